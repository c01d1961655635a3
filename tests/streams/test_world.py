"""What admission knows of where work topics end."""

from __future__ import annotations

from infra.settings import KafkaSettings
from streams.world import LiveWorld

PLACE = ("work.m.1.interactive", 0)


async def test_a_record_is_backlog_from_when_it_is_placed_and_counts_once() -> None:
    world = LiveWorld(KafkaSettings())
    world.placed(*PLACE)
    world.placed(*PLACE)
    assert world.ends[PLACE] == 2
    world.confirmed(*PLACE, 9)
    assert world.ends[PLACE] == 10
    world.confirmed(*PLACE, 8)
    assert world.ends[PLACE] == 10


async def test_a_record_that_was_not_written_leaves_no_backlog_behind() -> None:
    world = LiveWorld(KafkaSettings())
    world.confirmed(*PLACE, 9)
    for _ in range(100):
        world.placed(*PLACE)
        world.withdrawn(*PLACE)
    assert world.ends[PLACE] == 10
