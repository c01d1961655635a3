"""How admission says no: to the caller, to the ledgers, and of what can't be read to whoever operates it."""

from __future__ import annotations

import structlog

from decisions import cases, verdicts
from decisions.cases import Case, Refusal
from infra import metrics
from infra.dead_letters import dead_letter
from infra.log import EventProducer, Headers
from schemas.events import InferenceFailed, InferenceRejected, Reply
from schemas.reasons import Reason
from schemas.topics import LIFECYCLE
from streams.faust_shell import Record
from streams.outbox import Outgoing, deliver, reply_to
from streams.world import LiveWorld

PROCESS = "admission"

log = structlog.get_logger("streams.admission")


class Refusals:
    """Writes them, and returns when the broker has confirmed all of it. Raises HeadraceError (unavailable) if it can't."""

    def __init__(self, producer: EventProducer, world: LiveWorld) -> None:
        self._producer = producer
        self._world = world

    async def tell(self, rejected: InferenceRejected, grant: cases.Grant, trace: Headers) -> None:
        """A refusal for the caller alone: the request of that id goes on."""
        await deliver(self._producer, [reply_to(grant.reply, rejected, rejected.request_id)], trace)

    async def asked_again(self, case: Case, reply: Reply, trace: Headers) -> None:
        """Its stream is where the first with its id asked to have it, at `reply`: whoever asks from elsewhere hears that there is such a one."""
        log.info("asked again", request_id=case.request.request_id)
        if reply != case.grant.reply:
            refusal = Refusal(Reason.CONFLICT, "another request of this tenant has this id", "request_id")
            await self.tell(verdicts.rejected(case, refusal), case.grant, trace)

    async def reject(
        self, rejected: InferenceRejected, grant: cases.Grant, trace: Headers, *more: InferenceFailed
    ) -> None:
        """Tell a caller, and the ledgers, that its request isn't let in; `more` comes after it in the caller's stream."""
        # A name that a caller made up is no label: their number has no limit.
        model = rejected.model if self._world.stable(rejected.model) is not None else ""
        metrics.REQUESTS.labels(model, "", rejected.tier, rejected.reason).inc()
        records = [reply_to(grant.reply, rejected, rejected.request_id)]
        records += [reply_to(grant.reply, event, rejected.request_id) for event in more]
        records.append(Outgoing(LIFECYCLE, rejected, rejected.tenant))
        await deliver(self._producer, records, trace)

    async def take_back(self, rejected: InferenceRejected, grant: cases.Grant, trace: Headers) -> None:
        """Refuse what may be let in already. A refusal takes nothing back; the ending after it does, unless a worker has begun."""
        await self.reject(rejected, grant, trace, verdicts.taken_back(rejected))

    async def bury(self, record: Record, reason: Reason, message: str, event: object = None) -> None:
        """Put a record aside that can't be handled. `event`: what it was read as."""
        log.warning(
            "dead-lettered", topic=record.topic, partition=record.partition, offset=record.offset, reason=reason.value
        )
        text = message[: verdicts.MESSAGE_CHARS_MAX]
        await dead_letter(self._producer, record, reason.value, text, PROCESS, event)
