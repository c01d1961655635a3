"""Endings as a process on a real broker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infra.tracing import new_traceparent, trace_id
from schemas.codec import encode
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceStarted,
    Timings,
    TokensGenerated,
    Usage,
    WorkerReported,
)
from schemas.topics import ANSWERS, LIFECYCLE, TOKENS
from tests.streams.site import Agent, Site, new_id

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("endings")]
A = Attempt(1, 1)


def started(site: Site, rid: str, attempt: Attempt = A) -> GenerationStarted:
    return GenerationStarted(rid, site.tenant, site.model, "v1", "interactive", attempt, (0,), 3, "w", 1.5)


def tokens(rid: str, first: int, text: str, attempt: Attempt = A) -> TokensGenerated:
    return TokensGenerated(rid, 0, attempt, first, tuple(text.encode()), text)


def completed(site: Site, rid: str, total: int) -> InferenceCompleted:
    ends = (ChoiceEnd(0, total, "stop"),)
    return InferenceCompleted(
        rid, site.tenant, site.model, "v1", "interactive", A, ends, Usage(3, total), Timings(), "w"
    )


async def answer(site: Site, text: str = "hello", **where: Any) -> str:
    """A whole answer on the log."""
    rid = new_id()
    await site.tokens(started(site, rid), tokens(rid, 0, text), completed(site, rid, len(text.encode())), **where)
    return rid


async def test_an_answer_is_started_ended_and_answered(site: Site) -> None:
    rid = await answer(site)
    answered = await site.of(ANSWERS, InferenceAnswered, rid)
    assert (answered.choices[0].text, answered.usage, answered.error_reason) == ("hello", Usage(3, 5), None)
    ending = await site.of(LIFECYCLE, InferenceCompleted, rid)
    begun = await site.of(LIFECYCLE, InferenceStarted, rid)
    assert (begun.position.topic, begun.position.partition, begun.queue_ms) == (TOKENS, 3, 1.5)
    assert site.record_of(LIFECYCLE, ending).key == site.tenant.encode()
    assert site.record_of(ANSWERS, answered).key == rid.encode()
    assert site.record_of(LIFECYCLE, begun).offset < site.record_of(LIFECYCLE, ending).offset


async def test_a_direct_producers_topic_is_found_while_running(site: Site) -> None:
    """The topic is newer than the process; its JSON records are folded like any other."""
    rid, topic = new_id(), f"tokens.{site.tenant}"
    for event in (started(site, rid), tokens(rid, 0, "hi"), completed(site, rid, 2)):
        await site.producer.send_and_wait(topic, event, partition=0, encoding="json")
    assert (await site.of(ANSWERS, InferenceAnswered, rid)).choices[0].text == "hi"


async def test_the_trace_goes_on(site: Site) -> None:
    rid, parent = new_id(), new_traceparent()
    headers = (("traceparent", parent.encode()),)
    await site.producer.send_and_wait(TOKENS, started(site, rid), partition=3, headers=headers)
    begun = await site.of(LIFECYCLE, InferenceStarted, rid)
    assert trace_id(site.record_of(LIFECYCLE, begun).headers) == parent.split("-")[1]
    await site.tokens(completed(site, rid, 0))  # an open request would have later tests' records read again


async def test_a_cancel_ends_and_a_foreign_one_does_not(site: Site) -> None:
    rid = new_id()
    cancel = InferenceFailed(rid, site.tenant, "", "", "interactive", "cancelled", "", source="cancel")
    await site.tokens(started(site, rid), replace(cancel, tenant="other"), tokens(rid, 0, "hi"), cancel)
    ending = await site.of(LIFECYCLE, InferenceFailed, rid)
    assert (ending.tenant, ending.model, ending.reason, ending.totals) == (site.tenant, site.model, "cancelled", (2,))
    answered = await site.of(ANSWERS, InferenceAnswered, rid)
    assert (answered.error_reason, answered.choices[0].text) == ("cancelled", "hi")


async def test_a_cancel_of_something_unknown_and_a_rejection(site: Site) -> None:
    gone, refused = new_id(), new_id()
    await site.tokens(
        InferenceFailed(gone, site.tenant, "", "", "interactive", "cancelled", "", source="cancel"),
        InferenceRejected(refused, site.tenant, site.model, "interactive", "model_not_found", "no"),
    )
    assert (await site.of(LIFECYCLE, InferenceFailed, gone)).reason == "cancelled"
    assert (await site.of(ANSWERS, InferenceAnswered, refused)).error_reason == "model_not_found"
    assert not await site.all(LIFECYCLE, InferenceFailed, lambda event: event.request_id == refused)


async def test_junk_is_put_aside_and_the_next_answer_is_served(site: Site) -> None:
    good = encode(started(site, new_id()))
    report = WorkerReported("w", "m", "v1", "ready", (), 1, 0, 0)
    for value in (b"\xff\x00", None, good[:-1], b"\xc3\x01" + b"\x02" * 8 + good[10:], b"{", encode(report)):
        sent = await (await site.producer.send_raw(TOKENS, value, b"key", 3))
        letter = await site.buried(sent)
        assert (letter.value, letter.process) == (value, "endings")
        await site.of(ANSWERS, InferenceAnswered, await answer(site))


async def test_a_killed_endings_loses_nothing_and_repeats_the_same(site: Site, endings: Agent) -> None:
    """One request is open over the kill, some close before it, some while nobody reads."""
    long = new_id()
    await site.tokens(started(site, long), tokens(long, 0, "abc"))
    rids = [await answer(site, f"before {i}") for i in range(20)]
    await site.of(ANSWERS, InferenceAnswered, rids[5])
    endings.kill()
    rids += [await answer(site, f"after {i}") for i in range(20)]
    await site.tokens(tokens(long, 3, "def"), completed(site, long, 6))
    endings.start()
    for rid in [*rids, long]:
        await site.of(ANSWERS, InferenceAnswered, rid)
        await site.of(LIFECYCLE, InferenceCompleted, rid)
    assert (await site.of(ANSWERS, InferenceAnswered, long)).choices[0].text == "abcdef"
    every = await site.all(ANSWERS, InferenceAnswered)
    for rid in [*rids, long]:
        assert len({repr(found) for found in every if found.request_id == rid}) == 1, "a repetition differs"


async def test_an_orderly_stop_repeats_nothing_and_a_zombie_finds_it_closed(site: Site, endings: Agent) -> None:
    own: dict[str, Any] = {"topic": f"tokens.{site.tenant}", "partition": 0}  # nobody else leaves a request open there
    rids = [await answer(site, **own) for _ in range(10)]
    for rid in rids:
        await site.of(ANSWERS, InferenceAnswered, rid)
        await site.of(LIFECYCLE, InferenceCompleted, rid)
    assert endings.stop() == 0, endings.last_words()
    zombie = Attempt(0, 9)
    await site.tokens(started(site, rids[0], zombie), tokens(rids[0], 0, "zombie", zombie), **own)
    endings.start()
    last = await answer(site, **own)
    await site.of(ANSWERS, InferenceAnswered, last)
    await site.of(LIFECYCLE, InferenceStarted, last)
    assert len(await site.all(ANSWERS, InferenceAnswered, lambda event: event.tenant == site.tenant)) == len(rids) + 1
    assert len(await site.all(LIFECYCLE, InferenceStarted, lambda event: event.tenant == site.tenant)) == len(rids) + 1
