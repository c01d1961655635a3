from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.cores import usable_cores

ALLOWED = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", ALLOWED), ("100000 100000\n", 1), ("50000 100000", 1)])
def test_a_control_group_limits_them(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == cores


def test_an_older_control_group_limits_them(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == ALLOWED


def test_without_one_all_that_the_process_may_use_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALLOWED
