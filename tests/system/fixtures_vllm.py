"""A real language model on the system stack: SmolLM2-135M-Instruct in vLLM, in float32, so that greedy answers are comparable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.models import register_versions
from cli.registry import now_ms
from infra.artifacts import ensure_demo_model
from infra.models_file import ModelEntry
from tests.contracts.engine import CONTEXT, SLOTS
from tests.system.running import ROOT, RunningStack

LLM = "smollm2"
BOOT_S_MAX = 300.0
_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HEADRACE_WORKER_SESSION_TIMEOUT_MS": "6000"}


def demo_model() -> Path:
    """The weights' folder, made on the first run (half a minute). It stays in the checkout's data directory for the next."""
    return ensure_demo_model(Path(os.environ.get("HEADRACE_DATA") or ROOT / ".headrace"))


def engine_socket(stack: RunningStack) -> Path:
    """Where the worker's engine may be asked."""
    return stack.data_dir / "engine.sock"


@pytest.fixture(scope="module")
def llm(stack: RunningStack) -> Iterator[str]:
    """The model's name, once its worker `llm` is ready: a minute. Nothing else boots it, but for the kill that one test is about."""
    folder = demo_model()
    engine_args = {"dtype": "float32", "enforce_eager": True}
    entry = ModelEntry(LLM, "1", "vllm", str(folder), CONTEXT, slots=SLOTS, partitions=2, engine_args=engine_args)
    stack.thread.run(register_versions(stack.kafka, [entry.registered(folder, now_ms())]))
    program = ("tests.system.engine_host", str(engine_socket(stack)))
    stack.add("llm", "worker", LLM, "1", program=program, **_ENV)
    try:
        stack.await_ready("llm", BOOT_S_MAX)
        yield LLM
    finally:
        stack.remove("llm")
