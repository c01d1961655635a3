"""Lives of requests as `lifecycle` tells them, without anybody who serves them."""

from __future__ import annotations

from schemas.events import (
    Attempt,
    InferenceAdmitted,
    InferenceCompleted,
    InferenceStarted,
    Position,
    Reply,
    Timings,
    Usage,
)
from schemas.topics import LIFECYCLE, TOKENS
from tests.streams.site import Site, new_id, now_ms

A = Attempt(1, 1)


async def admit(
    site: Site, after_ms: int = 300, *, limit_ms: int | None = 60_000, reply: Reply | None = None, ago_ms: int = 0
) -> InferenceAdmitted:
    """A request of so long ago that is let in, and must have begun so much later than now."""
    event = InferenceAdmitted(
        new_id(),
        site.tenant,
        "k1",
        site.model,
        "v1",
        "interactive",
        reply or Reply(TOKENS, 3),
        site.work,
        0,
        3,
        7,
        10,
        now_ms() - ago_ms,
        now_ms() + after_ms,
        Position("requests.interactive", 0, 0),
        time_limit_ms=limit_ms,
    )
    await site.producer.send_and_wait(LIFECYCLE, event, key=site.tenant)
    return event


async def begin(site: Site, rid: str) -> None:
    started = InferenceStarted(rid, site.tenant, site.model, "v1", "interactive", A, "w", 1.0, Position(TOKENS, 3, 9))
    await site.producer.send_and_wait(LIFECYCLE, started, key=site.tenant)


async def complete(site: Site, rid: str) -> None:
    ended = InferenceCompleted(rid, site.tenant, site.model, "v1", "interactive", A, (), Usage(3, 0), Timings(), "w")
    await site.producer.send_and_wait(LIFECYCLE, ended, key=site.tenant)
