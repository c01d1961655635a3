"""What was asked with a key before it was revoked, and waits in the log still, is refused; so is what comes after, on each tier."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from bridge.calls import new_request_id
from infra.log import EventProducer
from schemas.events import InferenceRequested
from schemas.topics import BATCH, GRANT_HEADER, INTERACTIVE, requests_topic
from tests.system.running import MODEL, RunningStack, script

pytestmark = pytest.mark.timeout(180)
WAITING = 12
REFUSED = ("rejected", "invalid_grant")


def with_grant(stack: RunningStack, name: str) -> dict[str, Any]:
    """A new tenant's grant for both tiers, with the id of its key."""
    stack.command("tenants", "create", name)
    tiers = ("--tiers", f"{INTERACTIVE},{BATCH}", "--json")
    given: dict[str, Any] = json.loads(stack.command("tenants", "grant", name, *tiers).stdout)
    return given


def send(stack: RunningStack, given: dict[str, Any], tier: str, model: str, count: int = WAITING) -> list[str]:
    """So many requests, straight to the log; their ids."""
    asked = [InferenceRequested(new_request_id(), model, prompt=script(tokens=["x"])) for _ in range(count)]
    headers = [(GRANT_HEADER, given["grant"].encode())]

    async def work() -> None:
        producer = EventProducer(stack.kafka, "revocation-tests")
        await producer.start()
        try:
            for request in asked:
                await producer.send_and_wait(requests_topic(tier), request, key=given["tenant"], headers=headers)
        finally:
            await producer.stop()

    stack.thread.run(work())
    return [request.request_id for request in asked]


def endings(stack: RunningStack, names: list[str]) -> set[tuple[Any, Any]]:
    facts = [stack.ended(name).facts for name in names]
    return {(fact["outcome"], fact.get("reason")) for fact in facts}


def revoke(stack: RunningStack, given: dict[str, Any]) -> None:
    stack.command("tenants", "keys", "revoke", given["tenant"], given["key_id"])


@pytest.mark.parametrize("tier", [INTERACTIVE, BATCH])
def test_what_waits_in_the_log_is_refused(stack: RunningStack, tier: str) -> None:
    """Its records were written while the key held, and nobody decided on them."""
    given = with_grant(stack, f"left-{tier}-{secrets.token_hex(4)}")
    assert endings(stack, send(stack, given, tier, MODEL, 1)) == {("completed", None)}
    admission = f"admission-{tier}"
    stack.stop(admission)
    try:
        names = send(stack, given, tier, MODEL)
        revoke(stack, given)
    finally:
        stack.restart(admission)
    assert endings(stack, names) == {REFUSED}
    assert endings(stack, send(stack, given, tier, MODEL, 2)) == {REFUSED}, "and so is what comes"
