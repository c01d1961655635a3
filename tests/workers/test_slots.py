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


async def test_guests_slots_are_nobodys_to_wait_for_and_stay_free_for_takers() -> None:
    freed: list[int] = []
    made = Slots(3, lambda: freed.append(1), guests=1)
    made.take()
    made.take()
    waits = asyncio.create_task(made.acquire())
    await asyncio.sleep(0)
    assert (made.used, made.free) == (2, 1)
    made.take()
    assert made.free == 0
    made.give()  # a guest goes: whoever waits, waits for another
    await asyncio.sleep(0)
    assert (waits.done(), made.used, made.free) == (False, 2, 1)
    made.give()
    await waits
    assert (made.used, made.free) == (2, 1)
    made.give()
    made.give()
    assert (made.used, made.free) == (0, 3)


async def test_whoever_waits_is_passed_by_as_many_as_there_are_guests_slots_and_no_more() -> None:
    newcomers = [0]

    def fill() -> None:
        while made.free:
            newcomers[0] += 1
            made.take()

    made = Slots(9, fill, guests=1)
    fill()
    waits = asyncio.create_task(made.acquire())
    await asyncio.sleep(0)
    made.give()
    assert newcomers == [10]
    made.give()
    await waits
    assert (newcomers, made.used) == ([10], 9)
