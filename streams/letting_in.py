"""What is let in: its admission and its work are put into the log, and again, after a crash, what was decided before it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from decisions import verdicts
from decisions.accounts import Accounts, is_void
from decisions.cache import Entry, stream
from decisions.cases import Case, Refusal
from decisions.recalled import Verdict
from infra.log import EventProducer, Headers, NoSuchPartition, RecordTooLarge
from infra.objects import StoreAway
from schemas.errors import HeadraceError
from schemas.events import InferenceAdmitted, InferenceRejected, InferenceScheduled
from schemas.payloads import may_be_large
from schemas.reasons import Reason
from schemas.topics import LIFECYCLE
from streams.accounts import Ledgers
from streams.cache import ResponseCache
from streams.idempotency import Repeats
from streams.judge import Judge
from streams.large import STORE_AWAY_TEXT
from streams.lease import Lease
from streams.outbox import Outgoing, Together, deliver
from streams.patience import RETRIED_S, Patience, over
from streams.refusals import Refusals
from streams.world import LiveWorld

log = structlog.get_logger("streams.admission")


class TooLateError(Exception):
    """The log took an admission when it was valid no more. Never leaves this room."""


class LettingIn:
    """One tier's."""

    def __init__(
        self,
        producer: EventProducer,
        world: LiveWorld,
        ledgers: Ledgers,
        lease: Lease,
        cache: ResponseCache,
        judge: Judge,
        repeats: Repeats,
        refusals: Refusals,
        patience: Patience,
    ) -> None:
        self._producer = producer
        self._world = world
        self._ledgers = ledgers
        self._lease = lease
        self._cache = cache
        self._judge = judge
        self._repeats = repeats
        self._refusals = refusals
        self._patience = patience

    async def admit(self, case: Case, accounts: Accounts, trace: Headers, counts: Callable[[], None]) -> Refusal | None:
        """A request that passed all checks: why it isn't let in after all, or None. `counts` is called when it does, in its ledger. Raises
        TooLateError.

        No pause between the checks and the reservation: the next request is judged with it.
        """
        scheduled, admitted = verdicts.admitted(case, self._lease.until_ms if case.told_first else 0)
        entry = case.entry if admitted.cached else None
        topic, partition = admitted.work_topic, admitted.work_partition
        assert case.reserved is not None
        accounts.take(case.reserved, admitted)
        if entry is None:
            self._world.placed(topic, partition)
            self._cache.went(scheduled, partition)
        counts()
        work_of, is_told = _caused(scheduled, admitted, entry, case.cached_ms or 0), False
        try:
            value = await self._producer.encoded(admitted)
            self._ledgers.wrote(value, admitted)
            told = Outgoing(LIFECYCLE, admitted, admitted.tenant, case.source.partition, value=value)
            if isinstance(work_of, Outgoing) and may_be_large(scheduled):
                work_of = replace(work_of, value=await self._producer.encoded(scheduled))
            # No work without its reservation, whatever crashes; and what is answered at once is admitted before it ends.
            if case.told_first or entry is not None:
                (taken,) = await deliver(self._producer, [told], trace)
                self._lease.heard(taken.timestamp)
                if is_void(admitted, taken.timestamp):
                    raise TooLateError
                is_told = True
                (work,) = await deliver(self._producer, [work_of], trace)
            else:
                work, _ = await deliver(self._producer, [work_of, told], trace)
        except BaseException as error:
            if not is_told:  # else it counts until its ending gives it back, for everybody who reads it
                accounts.withdraw(admitted)
            if entry is None:
                self._world.withdrawn(topic, partition)
            if isinstance(error, RecordTooLarge):
                return Refusal(error.reason, error.message)
            if isinstance(error, NoSuchPartition):
                return Refusal(Reason.UNAVAILABLE, error.message, "model")
            if isinstance(error, StoreAway):
                return Refusal(Reason.UNAVAILABLE, STORE_AWAY_TEXT)
            raise
        if entry is None:
            self._world.confirmed(topic, partition, work.offset)
        await self._repeats.remember(admitted, accounts, trace)
        return None

    async def again(self, case: Case, verdict: Verdict, trace: Headers) -> None:
        """What was decided of this record before a crash, told again; its work is the same, and goes to the same place."""
        if isinstance(verdict, InferenceRejected):
            return await self._refusals.reject(verdict, case.grant, trace)
        version = self._world.models.version(verdict.model, verdict.version)
        if version is None:
            refusal = Refusal(Reason.MODEL_NOT_FOUND, f"The model `{verdict.model}` is gone.", "model")
            return await self._refusals.take_back(verdicts.rejected(case, refusal), case.grant, trace)
        until_s = time.monotonic() + RETRIED_S
        while True:
            try:
                case = await self._judge.tokenise(case, version)
                break
            except HeadraceError as error:
                if not error.retriable:
                    refusal = Refusal(error.reason, error.message, error.param)
                    return await self._refusals.take_back(verdicts.rejected(case, refusal), case.grant, trace)
                if error.reason is not Reason.OVERLOADED or over(verdict, until_s):
                    log.warning("its work can't be sent again", request_id=verdict.request_id, reason=error.message)
                    return None
            await self._patience.a_while(case.source.partition)
        case = verdicts.as_decided(case, verdict, version, self._world)
        entry = (await self._cache.look_up(case)).entry if verdict.cached else None
        age_ms = 0 if entry is None else max(0, case.now_ms - entry.stored_ms)
        work = _caused(verdicts.scheduled(case), verdict, entry, age_ms)
        with contextlib.suppress(NoSuchPartition, RecordTooLarge):
            # What isn't taken was not the first time either, and its caller was told so; a store that is away comes back.
            while True:
                try:
                    await deliver(self._producer, [work], trace)
                    break
                except StoreAway:
                    if over(verdict, until_s):
                        return None
                    await self._patience.a_while(case.source.partition)
            await self._repeats.remember(verdict, None, trace)
        return None


def _caused(
    work: InferenceScheduled, admitted: InferenceAdmitted, entry: Entry | None, age_ms: int
) -> Outgoing | Together:
    """What follows from letting a request in: work, or at once the whole stream that the response cache has of it."""
    if entry is None:
        return Outgoing(admitted.work_topic, work, work.request_id, admitted.work_partition)
    events, reply = stream(entry.answer, work, age_ms), work.reply
    return Together(reply.topic, events, work.request_id, reply.partition, reply.encoding)
