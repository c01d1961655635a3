"""Repeats act: who asks again hears where the first's stream is. Decided by `decisions.idempotency`.

The admission itself, on `lifecycle`, says under which key a request was let in; `streams.accounts` folds that. `idempotency.<tier>` says the
same, so that a newcomer needn't read a day of `lifecycle`: a request's record is confirmed there before the request is done with, so what
`lifecycle` is no longer read for is there.
"""

from __future__ import annotations

from decisions import idempotency as rules
from decisions.accounts import Accounts
from decisions.admission import grant_refusal
from decisions.cases import Case
from decisions.idempotency import First, KeyStanding
from infra import metrics
from infra.log import EventProducer, Headers
from schemas.events import InferenceAdmitted
from schemas.topics import LIFECYCLE, idempotency_topic
from streams.accounts import Ledgers
from streams.outbox import Outgoing, deliver, reply_to
from streams.world import LiveWorld


class Repeats:
    """What admission does for requests that are known by a key."""

    def __init__(self, world: LiveWorld, producer: EventProducer, ledgers: Ledgers) -> None:
        self._world = world
        self._producer = producer
        self._ledgers = ledgers

    async def standing(self, case: Case, accounts: Accounts) -> tuple[KeyStanding, First | None] | None:
        """What a request is to what was asked before; None if the partition is another's now.

        Whoever may not ask anything is refused for that, and hears nothing of what others asked.
        """
        if case.keyed is None or grant_refusal(case.grant, case.tier, case.requested_ms, self._world) is not None:
            return KeyStanding.NEW, None
        if not await self._ledgers.remembers(case.source.partition, accounts):
            return None
        return accounts.keys.standing(case.grant.tenant, case.keyed, case.requested_ms)

    async def join(self, case: Case, first: First, trace: Headers) -> None:
        """Tell a caller where the first's stream is; it costs nothing."""
        tenant = case.grant.tenant
        joined = rules.joined(case.request, tenant, case.tier, first, case.requested_ms, case.source)
        await deliver(
            self._producer,
            [reply_to(case.grant.reply, joined, joined.request_id), Outgoing(LIFECYCLE, joined, tenant)],
            trace,
        )
        metrics.JOINED.labels(case.tier).inc()

    async def remember(self, admitted: InferenceAdmitted, accounts: Accounts | None, trace: Headers) -> None:
        """A request was let in and its work is sent: its key stands for it from now on."""
        if (record := rules.remembered(admitted)) is None:
            return
        if accounts is not None:
            accounts.keys.hear(record)
        topic, partition = idempotency_topic(record.tier), admitted.source.partition
        await deliver(self._producer, [Outgoing(topic, record, record.tenant, partition)], trace)
