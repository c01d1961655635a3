"""Who waits for another of the same name takes no place, and one goes on at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from streams.alone import WAITING_MAX, Alone, TooManyWait


class Places:
    """A number of places; who steps aside gives his up meanwhile."""

    def __init__(self, count: int) -> None:
        self.slots = asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        self.slots.release()
        try:
            yield
        finally:
            await self.slots.acquire()


async def test_one_at_a_time_and_whoever_waits_leaves_room_for_others() -> None:
    places = Places(2)
    alone = Alone(places.aside)
    first_may_go, inside, most, done = asyncio.Event(), 0, 0, []

    async def work(name: str, number: int) -> None:
        nonlocal inside, most
        async with places.slots, alone.of(name):
            if name == "same":
                inside += 1
                most = max(most, inside)
                await (first_may_go.wait() if number == 0 else asyncio.sleep(0))
                inside -= 1
            done.append((name, number))

    same = [asyncio.create_task(work("same", number)) for number in range(20)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await asyncio.gather(*(work(f"other {number}", number) for number in range(20)))
        assert len(done) == 20
        first_may_go.set()
        await asyncio.gather(*same)
    assert most == 1
    assert len(done) == 40


async def test_a_name_is_free_again_after_an_error_and_a_cancel() -> None:
    alone = Alone(contextlib.nullcontext)
    with contextlib.suppress(ValueError):
        async with alone.of("name"):
            raise ValueError
    held = asyncio.create_task(_hold(alone))
    waits = asyncio.create_task(_hold(alone))
    await asyncio.sleep(0)
    for task in (waits, held):
        task.cancel()
    await asyncio.gather(held, waits, return_exceptions=True)
    async with asyncio.timeout(1):
        await alone.free("name")


async def _hold(alone: Alone) -> None:
    async with alone.of("name"):
        await asyncio.sleep(60)


async def test_no_more_wait_for_a_name_than_may_and_others_are_not_concerned() -> None:
    alone = Alone(contextlib.nullcontext)
    held = asyncio.create_task(_hold(alone))
    await asyncio.sleep(0)
    waits = [asyncio.create_task(alone.free("name")) for _ in range(WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyWait):
        await alone.free("name")
    await alone.free("another name")
    held.cancel()
    await asyncio.gather(*waits)
    async with alone.of("name"):
        pass
