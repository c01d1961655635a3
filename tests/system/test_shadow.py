"""The third tier on the running system: its requests, work and ledger are its own, and junk there stops nobody."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from infra.models_file import ModelEntry
from schemas.events import InferenceCompleted, TokensGenerated
from schemas.topics import GRANT_HEADER, SHADOW, TIERS, requests_topic, tenant_tokens_topic, work_topic
from tests.system.audit import Mark
from tests.system.fixtures_models import register, worker
from tests.system.running import RunningStack, script
from tests.system.test_junk import dead_letters, letters_counted, of_topics, send_junk
from tests.system.test_quotas import told
from tests.system.test_tiers import ask_directly, grant_for

pytestmark = pytest.mark.timeout(180)
MODEL, ADMISSION = "shadowed", "admission-shadow"
WORK = work_topic(MODEL, "1", SHADOW)


@pytest.fixture(scope="module")
def shadow(stack: RunningStack) -> Iterator[RunningStack]:
    """With an admission of this tier, and a model that has all tiers and one worker."""
    register(stack, ModelEntry(MODEL, "1", "scripted", "scripted", 4096, slots=2, partitions=1, tiers=TIERS))
    stack.add(ADMISSION, "streams", "admission", "--tier", SHADOW)
    with worker(stack, MODEL, MODEL):
        stack.await_ready(ADMISSION)
        yield stack
    stack.remove(ADMISSION)


@pytest.fixture
def owner(shadow: RunningStack) -> str:
    """A new tenant that may ask in this tier; its name."""
    shadow.command("tenants", "create", name := f"shadow-{secrets.token_hex(4)}", "--tiers", SHADOW)
    return name


def ask(stack: RunningStack, owner: str) -> str:
    (name,) = ask_directly(stack, SHADOW, MODEL, script(tokens=["ab"], repeat=3), tenant=owner)
    return name


def test_a_request_goes_the_tiers_own_way_and_is_charged_in_its_ledger(shadow: RunningStack, owner: str) -> None:
    name = ask(shadow, owner)
    assert shadow.ended(name).facts["outcome"] == "completed"
    records = shadow.history(name)
    found: dict[str, Any] = {item.name: item.event for item in records}
    admitted = found["InferenceAdmitted"]
    assert {found[each].tier for each in ("InferenceAdmitted", "InferenceScheduled", "InferenceCompleted")} == {SHADOW}
    assert (admitted.source.topic, admitted.work_topic) == (requests_topic(SHADOW), WORK)
    assert [item.topic for item in records if item.name == "InferenceScheduled"] == [WORK]
    stream = [item.event for item in records if item.topic == tenant_tokens_topic(owner)]
    made = "".join(event.text for event in stream if isinstance(event, TokensGenerated))
    (answer,) = (event for event in stream if isinstance(event, InferenceCompleted))
    assert made + answer.choices[0].text == "ababab"
    used = answer.usage.prompt_tokens + answer.usage.completion_tokens
    (usage,) = told(shadow, owner, SHADOW)
    assert (usage["requests"], usage["tokens"], usage["running"], usage["reserved_tokens"]) == (1, used, 0, 0)
    assert told(shadow, owner) == [], "and nothing is in another's"


def test_junk_is_put_aside_and_what_follows_is_served(shadow: RunningStack, owner: str) -> None:
    mark, before = Mark(shadow, "dead-letters"), letters_counted(shadow, ADMISSION, MODEL)
    headers = [(GRANT_HEADER, grant_for(shadow, SHADOW, owner).encode()), ("kind", b"\xff")]
    sent = shadow.thread.run(send_junk(shadow.kafka, [requests_topic(SHADOW), WORK], headers))
    assert shadow.ended(ask(shadow, owner)).facts["outcome"] == "completed"
    found = shadow.until(lambda: (letters := dead_letters(mark)).keys() >= set(sent) and letters)
    told_by = {(place.topic, found[place].process) for place in sent}
    assert told_by == {(requests_topic(SHADOW), "admission"), (WORK, "worker")}
    assert not any(GRANT_HEADER in found[place].headers for place in sent)
    shadow.until(lambda: letters_counted(shadow, ADMISSION, MODEL) - before >= of_topics(sent))
