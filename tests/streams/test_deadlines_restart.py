"""A keeper of deadlines that is killed and comes back. In a file of its own: another one would take its place meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import KafkaSettings
from schemas.events import InferenceFailed
from schemas.topics import TOKENS
from tests.streams.lives import admit, complete
from tests.streams.site import Agent, Site

pytestmark = pytest.mark.kafka


async def test_what_came_due_while_the_keeper_was_away_is_said_when_it_is_back(
    site: Site, kafka: KafkaSettings, tmp_path: Path
) -> None:
    agent = Agent("lifecycle", kafka, tmp_path, HEADRACE_LIFECYCLE_SESSION_TIMEOUT_MS="6000")
    agent.start()
    try:
        before = await admit(site, after_ms=2_000)
        await site.of(TOKENS, InferenceFailed, (await admit(site)).request_id)
        agent.kill()
        during, ended = await admit(site, after_ms=0), await admit(site, after_ms=0)
        await complete(site, ended.request_id)
        agent.start()
        for asked in (before, during):
            await site.of(TOKENS, InferenceFailed, asked.request_id)
        assert not await site.all(TOKENS, InferenceFailed, lambda word: word.request_id == ended.request_id)
    finally:
        assert agent.stop() == 0, agent.last_words()
