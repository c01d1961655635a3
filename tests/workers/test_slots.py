"""Slots: never more than there are, in order of asking, none lost."""

from __future__ import annotations

import asyncio

import pytest

from workers.slots import Slots


def slots(total: int) -> tuple[Slots, list[int]]:
    freed: list[int] = []
    return Slots(total, lambda: freed.append(1)), freed


async def test_waiters_come_before_takers_in_their_order() -> None:
    made, freed = slots(1)
    made.take()
    order: list[int] = []

    async def wait(number: int) -> None:
        await made.acquire()
        order.append(number)

    tasks = [asyncio.create_task(wait(i)) for i in range(3)]
    await asyncio.sleep(0)
    for _ in range(3):
        assert made.free == 0
        made.give()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert (made.used, freed) == (1, [])
    made.give()
    assert (made.used, made.free, freed) == (0, 1, [1])


async def test_a_waiter_that_gives_up_loses_no_slot() -> None:
    made, freed = slots(1)
    made.take()
    before, at_once = asyncio.create_task(made.acquire()), asyncio.create_task(made.acquire())
    await asyncio.sleep(0)
    before.cancel()
    await asyncio.gather(before, return_exceptions=True)
    made.give()  # to at_once, which is cancelled before it runs
    at_once.cancel()
    await asyncio.gather(at_once, return_exceptions=True)
    assert (made.used, made.free) == (0, 1)
    assert freed


def test_taking_more_than_there_are_is_a_bug() -> None:
    made, _ = slots(1)
    made.take()
    with pytest.raises(RuntimeError):
        made.take()
