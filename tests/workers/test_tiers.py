"""Tiers in a worker that runs: who begins first, which slots wait for a live call, and what the engine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from infra.settings import KafkaSettings
from schemas.events import Reply
from schemas.topics import BATCH, INTERACTIVE, SHADOW, TIERS, TOKENS
from tests.workers.lane import WAIT_S, Lane, open_lane
from tests.workers.test_loop import LONG
from workers.engines.port import EngineChunk, EngineRequest
from workers.engines.scripted import ScriptedEngine

FEW = 3
SAME = Reply(TOKENS, 0)
"""One partition tells the order in which requests begin."""


async def until_seen(lane: Lane, running: int, waiting: int) -> None:
    """The worker says that so many run and so many wait."""
    async with asyncio.timeout(WAIT_S):
        while [(seen.running, seen.waiting) for seen in await lane.reports(lane.last_worker_id)][-1:] != [  # noqa: ASYNC110
            (running, waiting)
        ]:
            await asyncio.sleep(0.1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The priority with which the engine was asked, by request."""
    found: dict[str, int] = {}
    generate = ScriptedEngine.generate

    def noted(self: ScriptedEngine, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        found[request.key.split(".")[0]] = request.priority
        return generate(self, request)

    monkeypatch.setattr(ScriptedEngine, "generate", noted)
    return found


async def test_interactive_goes_before_batch_and_batch_before_shadow_and_the_engine_hears_of_it(
    kafka: KafkaSettings, told: dict[str, int]
) -> None:
    """The lowest tier came first of all, and all wait for one slot."""
    async with open_lane(kafka, slots=1, tiers=TIERS) as lane, lane.worker(tiers=TIERS, report_interval_ms=100):
        holds = await lane.ask(LONG, reply=SAME)
        await lane.until_tokens(holds, 1)
        asked = {tier: [await lane.ask(tier, tier=tier, reply=SAME) for _ in range(FEW)] for tier in reversed(TIERS)}
        await until_seen(lane, 1, FEW * len(TIERS))
        await lane.cancel(holds)
        await lane.until_closed(*(rid for rids in asked.values() for rid in rids))
    assert lane.started == [holds, *asked[INTERACTIVE], *asked[BATCH], *asked[SHADOW]]
    for number, tier in enumerate((INTERACTIVE, BATCH, SHADOW)):
        assert [told[rid] for rid in asked[tier]] == [number] * FEW


async def test_a_slot_is_kept_free_for_whoever_calls_while_batch_jobs_fill_the_others(kafka: KafkaSettings) -> None:
    """Long jobs, one for each slot: none would end by itself before the call is over."""
    async with open_lane(kafka, slots=4, interactive_slots=1) as lane, lane.worker(report_interval_ms=100):
        batch = [await lane.ask(LONG, tier=BATCH) for _ in range(4)]
        await until_seen(lane, 3, 1)
        assert (await lane.until_closed(await lane.ask("at once")))[0].text == "at once"
        await until_seen(lane, 3, 1)
        begun = [rid for rid in batch if (await lane.read(rid)).starts]
        assert [(await lane.read(rid)).state.closed for rid in begun] == [None] * 3
        await lane.cancel(*batch)
        await until_seen(lane, 0, 0)
