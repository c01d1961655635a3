"""Early refusal in a running admission: by what the model's workers report."""

from __future__ import annotations

import asyncio

import pytest

from schemas.events import (
    InferenceAdmitted,
    InferenceRejected,
    ModelVersionRegistered,
    PartitionReport,
    WorkerReported,
)
from schemas.topics import LIFECYCLE, REGISTRY, WORKERS
from tests.streams.site import CONTEXT, WAIT_S, Site

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("admission")]

AT_ONCE_MS = 3_000


async def report(site: Site, *, running: int, service_ms: float = 60_000) -> None:
    """The model's only worker tells of its one slot."""
    held = tuple(PartitionReport(site.work, number, 0, 0) for number in (0, 1))
    event = WorkerReported("w", site.model, "v1", "ready", held, 1, running, 0, service_ms=service_ms)
    await site.producer.send_and_wait(WORKERS, event, key=f"w of {site.model}")


async def until_refused(site: Site, timeout_ms: int) -> InferenceRejected:
    """Reports are read a little later than they are written."""
    async with asyncio.timeout(WAIT_S):
        while True:
            verdict = await verdict_of(site, await site.ask(timeout_ms=timeout_ms))
            if isinstance(verdict, InferenceRejected):
                return verdict


async def verdict_of(site: Site, rid: str) -> InferenceAdmitted | InferenceRejected:
    found: InferenceAdmitted | InferenceRejected = await site.one(
        LIFECYCLE,
        InferenceAdmitted | InferenceRejected,  # type: ignore[arg-type]
        lambda event: event.request_id == rid,
    )
    return found


async def test_what_would_begin_too_late_is_refused_at_once(site: Site) -> None:
    await report(site, running=1)
    refusal = await until_refused(site, timeout_ms=10_000)
    assert (refusal.reason, refusal.param) == ("overloaded", "timeout")
    assert refusal.retry_after_ms is not None
    assert refusal.retry_after_ms >= 50_000
    assert site.record_of(LIFECYCLE, refusal).timestamp - refusal.requested_ms < AT_ONCE_MS
    patient = await site.ask(timeout_ms=3_600_000)
    admitted = await site.of(LIFECYCLE, InferenceAdmitted, patient)
    (wait,) = [decision for decision in admitted.decisions if decision.check == "wait"]
    assert "predicted wait" in wait.detail


async def test_a_queue_that_is_full_takes_no_more(site: Site) -> None:
    version = ModelVersionRegistered(
        site.model, "v1", "scripted", "", CONTEXT, tokenizer="bytes", partitions=2, max_queue_depth={"interactive": 2}
    )
    await site.producer.send_and_wait(REGISTRY, version, key=site.model)
    await report(site, running=1, service_ms=100)
    refusal = await until_refused(site, timeout_ms=3_600_000)
    assert (refusal.reason, refusal.param) == ("overloaded", "model")
    assert "no more than 2 may" in refusal.message
