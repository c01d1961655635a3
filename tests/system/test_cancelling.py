"""What is cancelled on purpose stops, whichever way that is said: by HTTP, on a socket, by a record. Its slot and the rest of its reservation return."""

from __future__ import annotations

import secrets

import httpx
import pytest

from schemas.events import Quota
from tests.system.asking import COMPLETIONS, body_of
from tests.system.audit import Audit, Story
from tests.system.running import RunningStack, script
from tests.system.test_quotas import tenant, told
from tests.system.ways import ByAnotherTiersRecord, ByHttp, ByRecord, OnASocket, Way, caller, found, until, used

pytestmark = pytest.mark.timeout(180)
TOKENS, TOKEN_MS = 1_000, 100
"""Of an answer that nobody waits for: it would take a minute and more."""
ROUNDS = 12
"""Chunks of one that somebody waits for."""


@pytest.mark.parametrize("kind", [ByHttp, OnASocket, ByRecord, ByAnotherTiersRecord], ids=lambda kind: kind.__name__)
def test_what_runs_stops_and_what_is_queued_never_runs(stack: RunningStack, narrow: str, kind: type[Way]) -> None:
    name = f"canceller-{kind.__name__.lower()}"
    stack.keys[name] = tenant(stack, name, Quota("interactive", concurrent_requests=2))
    audit = Audit(stack)
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    with caller(stack, kind, name, max_tokens=TOKENS) as way:
        for mark, so_far in ((first, "running"), (second, "admitted")):
            way.ask(mark, script(mark=mark, tokens=["x"], repeat=TOKENS, token_ms=TOKEN_MS), narrow)
            until(stack, audit, mark, so_far)
        assert ask(stack, narrow, name).status_code == httpx.codes.TOO_MANY_REQUESTS
        for mark in (second, first):
            request_id, _ = until(stack, audit, mark, "admitted")
            way.cancel(mark, request_id)
            _, story = until(stack, audit, mark, "ended")
            assert story.endings[0][:2] == ("failed", "cancelled")
        # There is one slot, and room for two calls: both are free again.
        last = ask(stack, narrow, name)
        assert last.json()["choices"][0]["text"] == "free" * ROUNDS
        # What was cancelled made no more from when the next had its slot, which took many times as long as a token.
        (begun,) = stack.events(last.headers["x-request-id"], "GenerationStarted")
        made = stack.events(until(stack, audit, first, "ended")[0], "TokensGenerated")
        assert made
        assert max(chunk.timestamp_ms for chunk in made) <= begun.timestamp_ms
        assert stack.until(lambda: stack.reports(narrow)[-1].running == 0)
    stories = audit.settled(scripted=False)
    (_, ran), (queued, never_ran) = (found(audit, mark) or ("", Story()) for mark in (first, second))
    assert len(stories) == 3
    assert 0 < sum(ran.stream.accepted) < TOKENS
    assert (stack.events(queued, "GenerationStarted"), sum(never_ran.stream.accepted)) == ([], 0)
    (usage,) = told(stack, name)
    assert (usage["running"], usage["reserved_tokens"]) == (0, 0)
    assert usage["tokens"] == used(audit)


def ask(stack: RunningStack, model: str, name: str) -> httpx.Response:
    """Takes a second and more."""
    slow = script(tokens=["free"], repeat=ROUNDS, token_ms=TOKEN_MS)
    return stack.http(name).post("/v1/completions", json=body_of(COMPLETIONS, slow, model))
