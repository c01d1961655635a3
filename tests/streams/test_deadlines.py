"""The keeper of deadlines as a process on a real broker. No worker is there: the clock alone answers."""

from __future__ import annotations

import pytest

from schemas.events import InferenceCancelled, InferenceFailed, Reply
from schemas.topics import CONTROL, LIFECYCLE, TOKENS
from tests.streams.lives import admit, begin, complete
from tests.streams.site import Site

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("lifecycle")]


async def test_what_nobody_begins_is_ended_at_its_deadline(site: Site) -> None:
    asked = await admit(site)
    word = await site.of(TOKENS, InferenceFailed, asked.request_id)
    assert (word.tenant, word.model, word.reason, word.source) == (
        site.tenant,
        site.model,
        "deadline_exceeded",
        "timer",
    )
    assert word.if_not_started
    record = site.record_of(TOKENS, word)
    assert record.partition == 3
    assert record.timestamp >= asked.deadline_ms
    assert not await site.all(CONTROL, InferenceCancelled, lambda event: event.request_id == asked.request_id)


async def test_a_direct_producer_hears_on_its_own_topic_in_its_own_encoding(site: Site) -> None:
    asked = await admit(site, reply=Reply(f"tokens.{site.tenant}", 0, "json"))
    word = await site.of(f"tokens.{site.tenant}", InferenceFailed, asked.request_id)
    assert site.record_of(f"tokens.{site.tenant}", word).value[:1] == b"{"


async def test_what_runs_beyond_its_limit_is_ended_and_its_worker_told(site: Site) -> None:
    asked = await admit(site, limit_ms=400)
    await begin(site, asked.request_id)
    word = await site.of(TOKENS, InferenceFailed, asked.request_id)
    assert (word.reason, word.if_not_started) == ("time_limit_exceeded", False)
    cancel = await site.of(CONTROL, InferenceCancelled, asked.request_id)
    assert cancel.tenant == site.tenant


async def test_who_works_on_what_was_refused_after_all_is_told_to_stop(site: Site) -> None:
    asked, served = await admit(site, after_ms=60_000), await admit(site, after_ms=60_000)
    ended = InferenceFailed(
        asked.request_id, site.tenant, site.model, "v1", "interactive", "rate_limited", "", source="admission"
    )
    await complete(site, served.request_id)
    await site.producer.send_and_wait(LIFECYCLE, ended, key=site.tenant)
    assert (await site.of(CONTROL, InferenceCancelled, asked.request_id)).tenant == site.tenant
    assert not await site.all(CONTROL, InferenceCancelled, lambda event: event.request_id == served.request_id)


async def test_what_began_or_ended_in_time_hears_nothing(site: Site) -> None:
    began, ended = await admit(site), await admit(site)
    await begin(site, began.request_id)
    await complete(site, ended.request_id)
    late = await admit(site, after_ms=600)
    await site.of(TOKENS, InferenceFailed, late.request_id)
    told = [
        word.request_id for word in await site.all(TOKENS, InferenceFailed, lambda word: word.tenant == site.tenant)
    ]
    assert told == [late.request_id]


async def test_a_partition_that_is_gone_and_junk_stop_nothing(site: Site) -> None:
    await admit(site, reply=Reply(f"tokens.{site.tenant}", 99))
    await (await site.producer.send_raw(LIFECYCLE, b"\xff\x00", site.tenant.encode()))
    asked = await admit(site)
    await site.of(TOKENS, InferenceFailed, asked.request_id)
