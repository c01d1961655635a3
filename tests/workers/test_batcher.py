"""Many callers at once, in any order of coming and leaving: each gets its own rows, and nothing is left behind."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from tests.onnx_models import looping, picking
from tests.workers.onnx_site import array, request, serving, tensor
from workers.engines.tensors import TensorResult

TABLE = (10.0, 20.0, 30.0)
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
ARGS = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 5),
        "max_queue_delay_ms": st.sampled_from([0, 2]),
        "preferred_batch_sizes": st.lists(st.integers(1, 5), max_size=2),
        "instances": st.integers(1, 2),
    }
)


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
