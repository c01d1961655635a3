"""What endings lets go of when it holds too much: no more than that, and where most of it is."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiokafka import TopicPartition

from infra.settings import EndingsSettings
from schemas.events import Attempt, GenerationStarted, TokensGenerated
from schemas.topics import HOUR_MS, TOKENS
from streams import endings as module
from streams.endings import Endings
from streams.fold_table import FoldTable

A = Attempt(1, 1)


def endings_of(open_requests_max: int, *open_in_each: int, text: str = "") -> Endings:
    """Endings with so many open requests in each partition, each with a text."""
    unused: Any = None
    found = Endings(EndingsSettings(open_requests_max=open_requests_max), unused, unused, unused)
    now_ms = int(time.time() * 1000)
    for number, count in enumerate(open_in_each):
        table = found._tables[TopicPartition(TOKENS, number)] = FoldTable(TOKENS, number, 0, HOUR_MS)
        for i in range(count):
            rid = f"{number}-{i}"
            table.apply(2 * i, now_ms, GenerationStarted(rid, "acme", "m", "1", "interactive", A, (0,), 1, "w"))
            table.apply(2 * i + 1, now_ms, TokensGenerated(rid, 0, A, 0, (), text))
    return found


def held(endings: Endings) -> list[list[str]]:
    return [list(table.open) for table in endings._tables.values()]


async def test_a_busy_partition_may_hold_more_than_its_share() -> None:
    endings = endings_of(10, 9, *[0] * 20)
    endings._bound()
    assert sum(map(len, held(endings))) == 9


async def test_of_too_many_requests_the_oldest_of_the_fullest_partition_go() -> None:
    endings = endings_of(8, 2, 7, 1)
    endings._bound()
    assert held(endings) == [["0-0", "0-1"], ["1-2", "1-3", "1-4", "1-5", "1-6"], ["2-0"]]
    endings = endings_of(1, 3, 3, 3)
    endings._bound()
    assert sum(map(len, held(endings))) == 1


async def test_of_too_much_text_the_oldest_of_the_fullest_partition_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONTENT_BYTES_TOTAL_MAX", 450)
    endings = endings_of(100, 1, 4, *[0] * 20, text="x" * 100)
    endings._bound()
    kept = [[request.counted is not None for request in table.open.values()] for table in endings._tables.values()]
    assert kept[:2] == [[True], [False, True, True, True]]
