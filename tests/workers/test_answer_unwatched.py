"""An answer that nobody watches learns of a send that failed as soon as one that is streamed."""

from __future__ import annotations

import pytest

from infra.log import NotDelivered
from tests.workers.test_answer import Broker, answer
from workers.answer import WHOLE_TOKENS


async def test_a_failed_send_ends_generation_and_not_only_the_answer() -> None:
    """What is made after it counts for nobody, and is made again: an answer of half an hour would take a whole one."""
    broker = Broker(None)
    made = answer(broker, stream=False)
    made.start((0,), 0.0)
    await made.add(0, tuple(range(WHOLE_TOKENS)), "x", None)
    broker.open[-1].set_exception(NotDelivered("gone"))
    for future in broker.open[:-1]:
        future.set_result(None)
    with pytest.raises(NotDelivered):
        await made.add(0, (WHOLE_TOKENS,), "x", None)
    made.close()


async def test_sends_that_were_confirmed_are_not_kept() -> None:
    broker = Broker(None)
    made = answer(broker, stream=False)
    made.start((0,), 0.0)
    for _ in range(50):
        await made.add(0, tuple(range(WHOLE_TOKENS)), "x", None)
        for future in broker.open:
            if not future.done():
                future.set_result(None)
    assert len(made._in_flight) <= 1
    made.close()
