from __future__ import annotations

import pytest

from decisions.placement import STALE_MS
from decisions.readiness import why_not_ready
from schemas.topics import BATCH, INTERACTIVE
from tests.decisions.worlds import NOW, Seen, worker


def why(*workers: Seen) -> str | None:
    return why_not_ready(workers, NOW)


def test_without_workers_a_version_is_not_ready() -> None:
    assert why() == "no worker is ready"


@pytest.mark.parametrize("tiers", [(), (INTERACTIVE,), (BATCH,), (INTERACTIVE, BATCH)])
def test_one_ready_worker_is_enough_whatever_it_serves(tiers: tuple[str, ...]) -> None:
    others = worker("a", {}, state="starting"), worker("b", {0: 0}, state="draining")
    assert why(*others, worker("c", {1: 0}, tiers=tiers)) is None


@pytest.mark.parametrize("state", ["starting", "draining", "stopped", "what a later release says"])
def test_a_worker_in_another_state_does_not_serve_yet_or_any_more(state: str) -> None:
    assert why(worker("a", {}, state=state)) == f"no worker is ready (1 {state})"


def test_a_report_is_believed_until_it_is_stale() -> None:
    assert why(worker("a", {0: 0}, seen_ms=NOW - STALE_MS)) is None
    assert why(worker("a", {0: 0}, seen_ms=NOW - STALE_MS - 1)) == "no worker is ready (1 silent)"
    assert why_not_ready([worker("a", {0: 0}, seen_ms=NOW - 101)], NOW, stale_ms=100) == "no worker is ready (1 silent)"


def test_a_report_that_is_newer_than_the_clock_is_believed() -> None:
    assert why(worker("a", {0: 0}, seen_ms=NOW + 500)) is None


def test_the_reason_counts_what_the_workers_do() -> None:
    silent = NOW - STALE_MS - 1
    workers = [worker(name, {}, state="starting") for name in "ab"]
    workers += [worker("c", {0: 0}, state="draining"), worker("d", {1: 0}, seen_ms=silent)]
    workers.append(worker("e", {}, state="starting", seen_ms=silent))
    assert why(*workers) == "no worker is ready (1 draining, 2 silent, 2 starting)"
