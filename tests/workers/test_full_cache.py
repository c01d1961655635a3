"""Tiers inside vLLM while its KV cache is full, by a real model on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.system.fixtures_vllm import BOOT_S_MAX, demo_model
from tests.system.running import ROOT
from tests.workers.full_cache import CONTEXT, PRIORITIES, PROMPT, RUN_S_MAX

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


def test_a_higher_tier_takes_a_lower_ones_place_in_the_cache_and_costs_it_no_token() -> None:
    """By arrival the last to come would be the first to go, and the last to end. Whoever had to begin anew makes the same tokens as it does alone."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.full_cache", str(demo_model())],
        cwd=ROOT, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}, capture_output=True, text=True,
        timeout=BOOT_S_MAX + RUN_S_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4_000:]
    at_once, alone = json.loads(done.stdout.splitlines()[-1])
    assert at_once[0][0] == "live"
    assert {name: len(made) for name, made in at_once} == dict.fromkeys(PRIORITIES, CONTEXT - PROMPT)
    assert sorted(at_once[1:]) == sorted(alone)
