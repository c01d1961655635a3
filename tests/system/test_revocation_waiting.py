"""What was asked on the log with a key that is revoked then: what waits is refused, also far back, and so is what comes after; what runs is cancelled."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from functools import partial
from typing import Any

import httpx
import pytest

from bridge.calls import new_request_id
from decisions.verdicts import REVOKED_TEXT
from infra.log import EventProducer
from infra.models_file import ModelEntry
from schemas.events import InferenceCompleted, InferenceFailed, InferenceRejected, InferenceRequested, TenantChanged
from schemas.topics import BATCH, GRANT_HEADER, INTERACTIVE, TENANTS, requests_topic
from tests.system.audit import Audit, Mark
from tests.system.fixtures_models import register, worker
from tests.system.running import MODEL, RunningStack, script
from tests.system.test_quotas import told
from tests.system.ways import used

pytestmark = pytest.mark.timeout(180)
WAITING = 12
REFUSED = ("rejected", "invalid_grant")
LONG: dict[str, Any] = {"tokens": ["x"], "repeat": 600, "token_ms": 200}
"""Of two minutes."""
SOON_MS = 2_000
"""So long after the record that revokes all that was asked with the key has ended, what waits as well as what runs."""
UNSERVED = "unserved"
LINES, AT_ONCE_MAX = 800, 600
"""Of so many no more than that are held, or were let in: the others are parked."""


def with_grant(stack: RunningStack, name: str) -> dict[str, Any]:
    """A new tenant's grant for both tiers, with the id of its key."""
    stack.command("tenants", "create", name)
    return granted(stack, name)


def granted(stack: RunningStack, name: str, *key: str) -> dict[str, Any]:
    tiers = ("--tiers", f"{INTERACTIVE},{BATCH}", "--json")
    given: dict[str, Any] = json.loads(stack.command("tenants", "grant", name, *key, *tiers).stdout)
    return given


def of_another_key(stack: RunningStack, name: str) -> dict[str, Any]:
    """The same of one more key that the tenant is given."""
    added = json.loads(stack.command("tenants", "keys", "add", name, "--json").stdout)
    return granted(stack, name, "--key-id", added["key_id"])


def send(
    stack: RunningStack, given: dict[str, Any], tier: str, model: str, count: int = WAITING, **directions: Any
) -> list[str]:
    """So many requests, straight to the log; their ids."""
    prompt = script(**({"tokens": ["x"]} | directions))
    asked = [InferenceRequested(new_request_id(), model, prompt=prompt) for _ in range(count)]
    headers = [(GRANT_HEADER, given["grant"].encode())]

    async def work() -> None:
        producer = EventProducer(stack.kafka, "revocation-tests")
        await producer.start()
        try:
            topic, key = requests_topic(tier), given["tenant"]
            await asyncio.gather(*[await producer.send(topic, each, key=key, headers=headers) for each in asked])
        finally:
            await producer.stop()

    stack.thread.run(work())
    return [request.request_id for request in asked]


def endings(stack: RunningStack, names: list[str]) -> set[tuple[Any, Any]]:
    facts = [stack.ended(name).facts for name in names]
    return {(fact["outcome"], fact.get("reason")) for fact in facts}


def revoked_ms(mark: Mark, name: str) -> int:
    """When the log got the tenant's last state, which is the one without the key."""
    states = (item for item in mark.records() if isinstance(item.event, TenantChanged) and item.event.tenant == name)
    return max(item.timestamp_ms for item in states)


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


def test_what_runs_is_cancelled_and_what_another_key_asked_goes_on(stack: RunningStack, single: str) -> None:
    given = with_grant(stack, name := f"runs-{secrets.token_hex(4)}")
    other = of_another_key(stack, name)
    audit, mark = Audit(stack), Mark(stack, TENANTS)
    (mine,), (others,) = (send(stack, each, INTERACTIVE, single, 1, **LONG) for each in (given, other))
    stack.until(lambda: all(stack.events(each, "TokensGenerated") for each in (mine, others)))
    stack.until(lambda: stack.reports(single)[-1].running == 2)
    revoke(stack, given)
    ended = stack.ended(mine)
    assert (ended.facts["outcome"], ended.facts["reason"]) == ("failed", "invalid_api_key")
    (ending,) = stack.events(mine, "InferenceFailed", f"tokens.{name}")
    assert ending.event.message == REVOKED_TEXT  # type: ignore[union-attr]
    assert ending.timestamp_ms - revoked_ms(mark, name) < SOON_MS
    stack.until(lambda: stack.reports(single)[-1].running == 1)
    assert told(stack, name)[0]["running"] == 1, "its place is free, and the other's isn't"
    made = len(stack.events(others, "TokensGenerated"))
    stack.until(lambda: len(stack.events(others, "TokensGenerated")) > made + 3)
    revoke(stack, other)
    stack.ended(others)
    stack.until(lambda: stack.reports(single)[-1].running == 0)
    spent = used(audit)
    (usage,) = told(stack, name)
    assert (usage["running"], usage["reserved_tokens"], usage["tokens"]) == (0, 0, spent)


def parked(stack: RunningStack) -> int:
    """How many requests are parked, as admission says."""
    address = f"http://127.0.0.1:{stack.ops_ports['admission-batch']}/metrics"
    found = re.search(r'headrace_parked\{tier="batch"\} (\S+)', httpx.get(address, timeout=5, trust_env=False).text)
    return int(float(found[1])) if found is not None else 0


def test_what_is_parked_is_refused_and_what_another_key_asked_is_served(stack: RunningStack) -> None:
    """Of a flood for a model without a worker only some are held: where the others wait no record is at hand any more."""
    register(stack, ModelEntry(UNSERVED, "1", "scripted", "scripted", 4096, slots=8, partitions=1))
    given = with_grant(stack, name := f"floods-{secrets.token_hex(4)}")
    other = of_another_key(stack, name)
    mark = Mark(stack, "lifecycle", f"tokens.{name}", TENANTS)
    flood = set(send(stack, given, BATCH, UNSERVED, LINES))
    (served,) = send(stack, other, BATCH, UNSERVED, 1)
    stack.until(lambda: parked(stack) > LINES - AT_ONCE_MAX)
    revoke(stack, given)

    def outcomes(topic: str) -> dict[str, tuple[str, int]]:
        """Of each request how it ended, and when the log got that."""
        kinds = (InferenceRejected, InferenceFailed, InferenceCompleted)
        return {
            item.event.request_id: (getattr(item.event, "reason", "completed"), item.timestamp_ms)
            for item in mark.records()
            if item.topic.startswith(topic) and isinstance(item.event, kinds)
        }

    def heard(topic: str) -> dict[str, tuple[str, int]] | None:
        found = outcomes(topic)
        return found if found.keys() >= flood else None

    for topic in ("lifecycle", "tokens."):
        told_of: dict[str, tuple[str, int]] = stack.until(partial(heard, topic))
        assert max(at_ms for _, at_ms in told_of.values()) - revoked_ms(mark, name) < SOON_MS
        found = {each: reason for each, (reason, _) in told_of.items()}
        refused = {each for each in flood if found[each] == "invalid_grant"}
        assert {found[each] for each in flood - refused} <= {"invalid_api_key"}, "those that had been let in"
        assert len(refused) >= LINES - AT_ONCE_MAX
        assert served not in found
    with worker(stack, UNSERVED, UNSERVED):
        stack.until(lambda: outcomes("lifecycle").get(served, ("",))[0] == "completed")
