"""Many callers at once, in any order of coming and leaving: each gets its own rows, and nothing is left behind."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from tests.onnx_models import doubling, looping, picking
from tests.workers.onnx_site import array, floats, request, serving, tensor
from workers.engines.onnx_session import Session
from workers.engines.port import EngineError
from workers.engines.tensors import TensorRequest, TensorResult

TABLE = (10.0, 20.0, 30.0)
FULL, DEPTH = 32, 5
"""Rows of a batch, and how often it can be halved."""
SLACK_MS = 2_000
ACTIONS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=7),  # which elements of the table, a row each
        st.sampled_from(["wait", "wait", "wait", "leave", "fail", "late"]),
        st.integers(0, 3),  # turns of the loop until the next comes
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=25,
)
ANY_ARGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 5),
        "max_queue_delay_ms": st.sampled_from([0, 2]),
        "preferred_batch_sizes": st.lists(st.integers(1, 5), max_size=2),
        "instances": st.integers(1, 2),
    }
)
ARGS = ANY_ARGS.filter(lambda args: max(args["preferred_batch_sizes"], default=0) <= args["max_batch_size"])


@settings(max_examples=25)
@given(actions=ACTIONS, args=ARGS)
def test_each_caller_gets_its_own_rows_whoever_else_comes_leaves_or_fails(
    actions: list[Any], args: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_play(picking(Path(scratch)), actions, args))


async def _play(folder: Path, actions: list[Any], args: dict[str, Any]) -> None:
    async with serving(folder, **args) as engine:
        tasks = []
        for rows, what, turns, priority in actions:
            values = [[row] for row in rows]
            if what == "fail":
                values[-1] = [99]
            asked = request(tensor("x", "INT64", values), within_ms=-1 if what == "late" else 60_000, priority=priority)
            task = asyncio.create_task(engine.infer(asked))
            tasks.append(task)
            for _ in range(turns):
                await asyncio.sleep(0)
            if what == "leave":
                task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        while engine.stats().running:  # noqa: ASYNC110  # what nobody waits for any more ends by itself
            await asyncio.sleep(0.001)
    for (rows, what, _, _), result in zip(actions, found, strict=True):
        if isinstance(result, asyncio.CancelledError):
            assert what == "leave"
        elif isinstance(result, HeadraceError):
            assert (what, result.reason) in {("fail", Reason.ENGINE_ERROR), ("late", Reason.DEADLINE_EXCEEDED)}
        else:
            assert what in {"wait", "leave"}
            assert np.array_equal(array(result)[:, 0], [TABLE[row] for row in rows])
            assert isinstance(result, TensorResult)
            assert result.batch <= args["max_batch_size"]


@pytest.mark.parametrize("delay_ms", [1.4, 2.4, 3.3])
def test_nobody_waits_on_when_a_timer_is_early(tmp_path: Path, delay_ms: float) -> None:
    """uvloop's timers have whole milliseconds, and its clock stands still for a turn: what they wake for may not be due yet."""

    async def play() -> None:
        async with serving(picking(tmp_path), max_queue_delay_ms=delay_ms) as engine, asyncio.timeout(60):
            for _ in range(20):
                assert array(await engine.infer(request(tensor("x", "INT64", [[1]])))).tolist() == [[20.0]]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


def test_nor_past_a_deadline(tmp_path: Path) -> None:
    async def play() -> None:
        async with serving(looping(tmp_path)) as engine, asyncio.timeout(60):
            busy = asyncio.create_task(engine.infer(request(tensor("turns", "INT64", [[1 << 62]]))))
            while not engine.stats().running:  # noqa: ASYNC110  # an engine tells nobody
                await asyncio.sleep(0.001)
            for _ in range(20):
                with pytest.raises(HeadraceError) as told:
                    await engine.infer(request(tensor("turns", "INT64", [[1]]), within_ms=7.4))
                assert told.value.reason is Reason.DEADLINE_EXCEEDED
            busy.cancel()
            await asyncio.wait({busy})
            while engine.stats().running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


def in_turn(place: int, value: int, priority: int = 0) -> TensorRequest:
    """A row that stands in line by its place: deadlines are an hour apart."""
    return request(tensor("x", "INT64", [[value]]), within_ms=(24 + place) * 3_600_000, priority=priority)


@pytest.mark.parametrize("culprit", [0, 13, 31])
async def test_one_at_fault_in_a_full_batch_is_found_in_few_runs_and_each_outcome_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    """The last run waits until a caller has been told: if outcomes came at the end it would wait in vain."""
    ran: list[list[int]] = []
    told = threading.Event()
    in_time: list[bool] = []
    run = Session.run

    def watched(session: Session, feeds: Any, fetch: Any, options: Any) -> Any:
        ran.append(feeds["x"][:, 0].tolist())
        if len(ran) == 2 * DEPTH + 1:
            in_time.append(told.wait(10))
        return run(session, feeds, fetch, options)

    monkeypatch.setattr(Session, "run", watched)
    values = [99 if i == culprit else i % 3 for i in range(FULL)]
    async with serving(picking(tmp_path), max_batch_size=FULL, max_queue_delay_ms=60_000) as engine:
        asked = [in_turn(i, value) for i, value in enumerate(values)]
        tasks = [asyncio.create_task(engine.infer(each)) for each in asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        told.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert in_time == [True]
    assert len(ran) == 2 * DEPTH + 1
    assert ran[0] == values
    assert isinstance(bad := found.pop(culprit), EngineError)
    assert "out of data bounds, idx=99" in bad.message
    del values[culprit]
    assert [array(each).tolist() for each in found] == [[[TABLE[value]]] for value in values]


async def test_if_all_are_at_fault_each_gets_its_own_error_in_the_order_of_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0
    run = Session.run

    def counted(*given: Any) -> Any:
        nonlocal runs
        runs += 1
        return run(*given)

    monkeypatch.setattr(Session, "run", counted)
    told: list[str] = []

    async def ask(value: int) -> None:
        with pytest.raises(EngineError) as failed:
            await engine.infer(in_turn(value, value, priority=1 if value < 104 else 0))
        told.append(failed.value.message.rpartition("idx=")[2][:3])

    async with serving(picking(tmp_path), max_batch_size=8, max_queue_delay_ms=60_000) as engine:
        await asyncio.gather(*(ask(value) for value in range(100, 108)))
    assert told == ["104", "105", "106", "107", "100", "101", "102", "103"]
    assert runs == 2 * 8 - 1


async def test_who_leaves_while_a_failed_batch_runs_again_runs_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes nobody along: that a run was ended is no answer to the others."""
    ran: list[list[int]] = []
    begun, left = threading.Event(), threading.Event()
    run = Session.run

    def watched(session: Session, feeds: Any, fetch: Any, options: Any) -> Any:
        ran.append(feeds["x"][:, 0].tolist())
        if len(ran) == 2:
            begun.set()
            left.wait(30)
        return run(session, feeds, fetch, options)

    monkeypatch.setattr(Session, "run", watched)
    async with serving(picking(tmp_path), max_batch_size=4, max_queue_delay_ms=60_000) as engine:
        asked = [in_turn(i, value) for i, value in enumerate((0, 1, 2, 99))]
        tasks = [asyncio.create_task(engine.infer(each)) for each in asked]
        assert await asyncio.to_thread(begun.wait, 30)
        tasks[3].cancel()
        await asyncio.wait({tasks[3]})
        left.set()
        found = await asyncio.gather(*tasks[:3])
        while engine.stats().running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert ran == [[0, 1, 2, 99], [0, 1], [2]]
    assert [array(each).tolist() for each in found] == [[[value]] for value in TABLE]


async def test_an_instance_that_fails_fast_gets_no_more_than_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it fails isn't tried on the other."""
    ran: list[Session] = []
    run = Session.run

    def watched(session: Session, *given: Any) -> Any:
        ran.append(session)
        if session is ran[0]:
            raise EngineError("this instance always fails")
        return run(session, *given)

    monkeypatch.setattr("workers.engines.onnx.usable_cores", lambda: 4)  # so that each has a session of its own
    monkeypatch.setattr(Session, "run", watched)
    failed = 0
    async with serving(doubling(tmp_path), instances=2, max_batch_size=8) as engine:
        for _ in range(20):
            try:
                await engine.infer(request(floats([1, 2])))
            except EngineError:
                failed += 1
    assert failed == 10
    assert len(ran) == 20


async def test_a_batch_of_a_preferred_size_waits_no_more(tmp_path: Path) -> None:
    async with (
        serving(picking(tmp_path), max_queue_delay_ms=60_000, preferred_batch_sizes=[2]) as engine,
        asyncio.timeout(30),
    ):
        asked = [asyncio.create_task(engine.infer(in_turn(i, i))) for i in range(3)]
        found = await asyncio.gather(*asked[:2])
        assert [each.batch for each in found] == [2, 2]
        assert [array(each).tolist() for each in found] == [[[10.0]], [[20.0]]]
        assert max(each.queue_ms for each in found) < SLACK_MS
        assert engine.stats().waiting == 1, "the third has no company"
        late = await engine.infer(in_turn(3, 0))
        assert (late.batch, array(await asked[2]).tolist()) == (2, [[30.0]])


@pytest.mark.parametrize("delay_ms", [0, 50])
async def test_a_lone_call_waits_for_company_as_long_as_is_said_and_no_longer(tmp_path: Path, delay_ms: int) -> None:
    async with serving(doubling(tmp_path), max_queue_delay_ms=delay_ms) as engine:
        found = await engine.infer(request(floats([1, 2])))
    assert found.batch == 1
    assert delay_ms <= found.queue_ms <= delay_ms + SLACK_MS
