"""One work record that this worker has taken, from its window to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from aiokafka import ConsumerRecord
from aiokafka.structs import RecordMetadata

from decisions.takeover import Action, Plan
from decisions.window import Waiting, expired
from infra.log import EventProducer, Headers
from infra.tracing import child
from schemas.events import Attempt, Event, InferenceFailed, InferenceScheduled
from schemas.reasons import Reason
from workers.group import Held
from workers.job import Job


class RequestKey(NamedTuple):
    """What names a request for one worker."""

    tenant: str
    request_id: str


@dataclass(slots=True, eq=False)
class Work:
    """A taken record. `attempt` is set once a marker fenced it; `plan` by what its stream then told; `job` while it runs.

    `large` says that it came from the object store, and counts among those that are held.
    """

    held: Held
    record: ConsumerRecord[bytes, bytes]
    scheduled: InferenceScheduled
    headers: Headers
    waiting: Waiting
    attempt: Attempt | None = None
    plan: Plan | None = None
    job: Job | None = None
    large: bool = False

    @property
    def key(self) -> RequestKey:
        """The request's name."""
        return RequestKey(self.scheduled.tenant, self.scheduled.request_id)

    @property
    def offset(self) -> int:
        """Where the record is in its partition."""
        offset: int = self.record.offset
        return offset

    @property
    def timestamp_ms(self) -> int:
        """When the broker appended the record."""
        timestamp_ms: int = self.record.timestamp
        return timestamp_ms

    @property
    def fence(self) -> bool:
        """Whether a former owner may have started it, so that it must be fenced first."""
        return self.attempt is None and self.offset < self.held.fence_below

    def late(self, now_ms: int) -> bool:
        """Whether its deadline has passed, which counts only while its stream has no tokens."""
        if self.plan is not None and (any(self.plan.totals) or self.plan.action is not Action.RUN):
            return False
        return expired(self.waiting, now_ms)


def fresh_plan(scheduled: InferenceScheduled) -> Plan:
    """The plan for a record that nobody can have started."""
    return Plan(Action.RUN, ((),) * scheduled.sampling.n)


def refusal(scheduled: InferenceScheduled, reason: Reason, message: str) -> InferenceFailed:
    """Ends a request that nobody has started. If somebody has, the fold ignores it."""
    return InferenceFailed(
        scheduled.request_id,
        scheduled.tenant,
        scheduled.model,
        scheduled.version,
        scheduled.tier,
        reason.value,
        message,
        if_not_started=True,
    )


async def tell(producer: EventProducer, work: Work, event: Event) -> asyncio.Future[RecordMetadata]:
    """Sends an event to the caller's `tokens` partition; the future resolves when the broker has confirmed it."""
    asked = work.scheduled
    return await producer.send(
        asked.reply.topic,
        event,
        key=asked.request_id,
        partition=asked.reply.partition,
        headers=child(work.headers),
        encoding=asked.reply.encoding,
        owner=asked.tenant,
    )


async def tell_and_wait(producer: EventProducer, work: Work, event: Event) -> RecordMetadata:
    """`tell`, and wait for the broker's word."""
    return await (await tell(producer, work, event))
