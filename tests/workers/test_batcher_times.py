"""When the batcher's shell begins what waits, in a time of its own: its loop's clock goes on only when nothing is left to do, so times are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decisions.batching import Limits
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from workers.engines import batcher, instances
from workers.engines.batcher import Batcher
from workers.engines.instances import Attempt, Batch, Told
from workers.processors.port import Part

SLACK_MS = 1.0
"""The loop's turns take a microsecond each."""
RUN_MS_MAX = 400
LATE = Reason.DEADLINE_EXCEEDED.value
LONG_MS = 600_000


class TimedLoop(asyncio.SelectorEventLoop):
    """Goes to its next timer at once when nothing else is due."""

    _now_s = 1_000.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
        self._now_s += 1e-6
        super()._run_once()  # type: ignore[misc]


def clock_ms() -> float:
    return asyncio.get_running_loop().time() * 1000


@dataclass(eq=False)
class Run:
    """One batch on an instance."""

    begun_ms: float
    names: list[int]
    kinds: set[Any]
    rows: int
    ended_ms: float = LONG_MS * 1_000.0


@dataclass
class Site:
    """The instances' runs, and how long each takes, in turn."""

    durations_ms: Sequence[int]
    runs: list[list[Run]] = field(default_factory=list)
    count: int = 0


class Timed:
    """An instance whose runs only take their time."""

    def __init__(self, session: Site, processor: object, tell: Callable[[Any, Batch, Told], None]) -> None:
        self.batch: Batch | None = None
        self._site, self._tell, self._runs = session, tell, list[Run]()
        session.runs.append(self._runs)

    def give(self, batch: Batch) -> None:
        assert self.batch is None
        self.batch, now = batch, clock_ms()
        parts = [member.part for member in batch.members]
        names = [part.payload for part in parts]
        run = Run(now, names, {part.signature for part in parts}, sum(part.rows for part in parts))
        self._runs.append(run)
        batch._attempt = Attempt(batch.members, SimpleNamespace(terminate=False), now)
        self._site.count += 1
        duration_ms = self._site.durations_ms[self._site.count % len(self._site.durations_ms)]
        asyncio.get_running_loop().call_later(duration_ms / 1000, self._end, batch, run)

    def _end(self, batch: Batch, run: Run) -> None:
        run.ended_ms = clock_ms()
        outcomes: dict[Any, list[Any]] = {member: [] for member in batch.members}
        self._tell(self, batch, Told(outcomes, run.rows, run.ended_ms - run.begun_ms, last=True))

    def leave(self) -> None:
        pass

    def join(self, timeout_s: float) -> bool:
        return True


@dataclass(frozen=True)
class Asked:
    """A call: `gap_ms` after the one before, rows of one signature, which leaves after `leaves_ms` if that comes first."""

    gap_ms: int
    kind: str
    rows: int
    priority: int
    within_ms: int
    leaves_ms: int | None


ASKED = st.builds(
    Asked,
    st.sampled_from([0, 0, 0, 1, 7, 40]),
    st.sampled_from("ab"),
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from([5, 60, 500, LONG_MS, LONG_MS]),
    st.sampled_from([None, None, None, 3, 90]),
)
LIMITS = st.builds(
    Limits,
    st.integers(3, 6),
    st.sampled_from([0, 2, 15, 100]),
    st.lists(st.integers(1, 6), max_size=2).map(tuple),
)


@dataclass
class Fate:
    """What became of a call, and when."""

    came_ms: float
    over_ms: float = 0.0
    outcome: str = ""


async def ask(shell: Batcher, number: int, asked: Asked) -> Fate:
    fate = Fate(clock_ms())
    part = Part(asked.kind, asked.rows, number, ())
    try:
        async with asyncio.timeout(None if asked.leaves_ms is None else asked.leaves_ms / 1000):
            await shell.run([part], fate.came_ms + asked.within_ms, asked.priority)
        fate.outcome = "answered"
    except TimeoutError:
        fate.outcome = "left"
    except HeadraceError as error:
        fate.outcome = error.reason.value
    fate.over_ms = clock_ms()
    return fate


async def play(limits: Limits, calls: Sequence[Asked], count: int, durations_ms: Sequence[int]) -> tuple[Site, list[Fate]]:  # fmt: skip
    site = Site(durations_ms)
    sessions: Any = [site] * count
    shell = Batcher(limits, sessions, SimpleNamespace(), LONG_MS)
    tasks = []
    for number, asked in enumerate(calls):
        await asyncio.sleep(asked.gap_ms / 1000)
        tasks.append(asyncio.create_task(ask(shell, number, asked)))
    fates = await asyncio.gather(*tasks)
    while shell.stats.running:  # noqa: ASYNC110  # those whom nobody waits for
        await asyncio.sleep(0.01)
    assert shell.stats.waiting == 0
    await shell.close(HeadraceError(Reason.UNAVAILABLE, "done"))
    return site, fates


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Site, list[Fate]]]:
    """Plays calls; what the instances ran and what became of the calls."""
    monkeypatch.setattr(batcher, "Instance", Timed)
    monkeypatch.setattr(batcher, "now_ms", clock_ms)
    monkeypatch.setattr(instances, "now_ms", clock_ms)

    def run(*given: Any) -> tuple[Site, list[Fate]]:
        with asyncio.Runner(loop_factory=TimedLoop) as runner:
            return runner.run(play(*given))

    return run


def idle_within(site: Site, since_ms: float, until_ms: float) -> bool:
    """Whether an instance had nothing to run for longer than the slack in that time."""
    for runs in site.runs:
        at = since_ms
        for run in runs:
            if run.begun_ms > at + SLACK_MS and at + SLACK_MS < until_ms:
                return True
            at = max(at, run.ended_ms)
        if at + SLACK_MS < until_ms:
            return True
    return False


def test_nobody_waits_on_beside_an_idle_instance_and_no_deadline_waits_for_a_run(
    timed: Callable[..., tuple[Site, list[Fate]]],
) -> None:
    @settings(max_examples=150, deadline=None)
    @given(
        LIMITS,
        st.lists(ASKED, min_size=1, max_size=20),
        st.integers(1, 3),
        st.lists(st.integers(1, RUN_MS_MAX), min_size=1, max_size=4),
    )
    def check(limits: Limits, calls: list[Asked], count: int, durations_ms: list[int]) -> None:
        site, fates = timed(limits, calls, count, durations_ms)
        runs = [run for each in site.runs for run in each]
        assert all(run.rows <= limits.max_batch_size and len(run.kinds) == 1 for run in runs)
        begun = {name: run for run in runs for name in run.names}
        assert len(begun) == sum(len(run.names) for run in runs), "each runs once"
        for number, (asked, fate) in enumerate(zip(calls, fates, strict=True)):
            run = begun.get(number)
            deadline_ms = fate.came_ms + asked.within_ms
            waited_until_ms = fate.over_ms if run is None else run.begun_ms
            assert not idle_within(site, fate.came_ms + limits.max_queue_delay_ms, waited_until_ms)
            if run is None:
                assert fate.outcome in {LATE, "left"}
            else:
                assert run.begun_ms < deadline_ms + SLACK_MS
                assert fate.outcome in {"answered", "left"}
            if fate.outcome == LATE:
                assert deadline_ms <= fate.over_ms <= deadline_ms + SLACK_MS, "at its deadline, whatever runs"
            if fate.outcome == "answered":
                assert run is not None and fate.over_ms <= run.ended_ms + SLACK_MS

    check()


def test_a_deadline_passes_in_time_while_every_instance_is_busy(
    timed: Callable[..., tuple[Site, list[Fate]]],
) -> None:
    calls = [Asked(0, "a", 1, 0, LONG_MS, None), Asked(1, "a", 1, 0, 50, None), Asked(0, "a", 1, 0, LONG_MS, None)]
    site, fates = timed(Limits(1), calls, 1, [RUN_MS_MAX])
    assert [fate.outcome for fate in fates] == ["answered", LATE, "answered"]
    assert fates[1].over_ms - fates[1].came_ms == pytest.approx(50, abs=SLACK_MS)
    assert [run.names for run in site.runs[0]] == [[0], [2]]
    assert site.runs[0][1].begun_ms - site.runs[0][0].ended_ms < SLACK_MS


def test_with_company_it_goes_at_once_and_alone_when_its_time_is_over(
    timed: Callable[..., tuple[Site, list[Fate]]],
) -> None:
    calls = [
        Asked(0, "a", 2, 0, LONG_MS, None),
        Asked(40, "a", 2, 0, LONG_MS, None),
        Asked(1, "a", 1, 0, LONG_MS, None),
    ]
    site, fates = timed(Limits(4, 100), calls, 2, [1])
    first, second = sorted((run for runs in site.runs for run in runs), key=lambda run: run.begun_ms)
    assert (first.names, second.names) == ([0, 1], [2])
    assert first.begun_ms - fates[0].came_ms == pytest.approx(40, abs=SLACK_MS)
    assert second.begun_ms - fates[2].came_ms == pytest.approx(100, abs=SLACK_MS)


@pytest.mark.parametrize("instances_count", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("comes_ms", [0, 1, 57, 400, 1_111])
def test_of_two_hundred_jobs_only_what_runs_already_goes_before_a_live_call(
    timed: Callable[..., tuple[Site, list[Fate]]], instances_count: int, most: int, comes_ms: int
) -> None:
    """triton#6055: it is in the next batch that begins, whichever instance is idle first."""
    jobs = [Asked(0, "a", 1, 1, LONG_MS, None)] * 200
    site, fates = timed(Limits(most), [*jobs, Asked(comes_ms, "a", 1, 0, LONG_MS, None)], instances_count, [91, 40, 77])
    live, came_ms = len(jobs), fates[-1].came_ms
    runs = [run for each in site.runs for run in each]
    (own,) = (run for run in runs if live in run.names)
    assert not [run for run in runs if came_ms < run.begun_ms < own.begun_ms], "none began after it came"
    running = [run for run in runs if run.begun_ms <= came_ms < run.ended_ms]
    assert len(running) <= instances_count
    assert all(own.begun_ms <= run.ended_ms + SLACK_MS for run in running), (
        "nor did it wait for more than the first of them"
    )
