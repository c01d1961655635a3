"""Admission acts: reads `requests.<tier>`, decides by `decisions.admission`, writes `work.*`, `lifecycle`, `tokens`.

Runs as one Faust app a tier. Each record is handled in its own task, so a long prompt that is being tokenised holds
nobody up, and its offset is acked, in order, when the broker has confirmed all that it caused. After a crash records are
handled again; ids derive from the input, so that changes nothing for readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import lru_cache

import structlog
from aiokafka.partitioner import DefaultPartitioner

from decisions import admission as rules
from decisions import cases, verdicts
from decisions.accounts import ANY_TIER, Accounts
from decisions.cases import Case, Refusal
from decisions.idempotency import KeyStanding, conflict, keyed
from decisions.recalled import Standing
from infra import metrics
from infra.grants import Grant
from infra.log import EventDecoder, EventProducer, Headers, NoSuchPartition, RecordTooLarge
from infra.settings import AdmissionSettings
from infra.tracing import child
from schemas.errors import HeadraceError
from schemas.events import (
    InferenceAdmitted,
    InferenceCancelled,
    InferenceRejected,
    InferenceRequested,
    PayloadStored,
    Position,
    Reply,
)
from schemas.reasons import Reason
from schemas.topics import (
    LIFECYCLE,
    requests_topic,
)
from streams.accounts import Ledgers
from streams.alone import Alone, TooManyWait, id_name
from streams.by_reference import ByReference
from streams.cache import ResponseCache
from streams.faust_shell import LeftUndone, Parked, Record
from streams.idempotency import Repeats
from streams.intake import REKEYED_HEADER, Intake, read_record, salvage, shortened
from streams.judge import Judge
from streams.large import Large
from streams.lease import Lease
from streams.letting_in import LettingIn, TooLateError
from streams.outbox import Outgoing, cut_short, deliver
from streams.patience import Patience
from streams.presence import Slots
from streams.refusals import Refusals
from streams.tokenizers import Tokenizers
from streams.turnstile import Turnstile, Unwanted
from streams.world import LiveWorld

CANCEL_LOOK_S = 0.2
"""A request that is still being fetched may come to wait for its turn after its cancel."""
TENANTS_MAX = 4_096
"""Of so many it is remembered which partition is theirs."""

log = structlog.get_logger("streams.admission")


_TOO_MANY = Refusal(Reason.OVERLOADED, "Too many ask for the same thing at once. Try again later.", "request_id", 1_000)


class Admission:
    """Handles one tier's records. `handle` is safe to call again for the same record."""

    def __init__(
        self,
        settings: AdmissionSettings,
        producer: EventProducer,
        decoder: EventDecoder,
        world: LiveWorld,
        tokenizers: Tokenizers,
        ledgers: Ledgers,
        lease: Lease,
        turnstile: Turnstile,
        cache: ResponseCache,
    ) -> None:
        self._turnstile = turnstile
        self._ledgers = ledgers
        self._settings = settings
        self._producer = producer
        self._decoder = decoder
        self._world = world
        self._topic = requests_topic(settings.tier)
        self._patience = patience = Patience(ledgers, turnstile)
        self._deciding = Alone(patience.aside)
        self._refusals = refusals = Refusals(producer, world)
        self._repeats = repeats = Repeats(world, producer, ledgers)
        self._judge = judge = Judge(world, tokenizers, ledgers, turnstile, cache, Slots(world, ledgers, producer))
        self._letting_in = LettingIn(producer, world, ledgers, lease, cache, judge, repeats, refusals, patience)
        self._references = ByReference(
            decoder, world, ledgers, turnstile, repeats, refusals, patience, self._deciding, self._decide
        )

    async def handle(self, record: Record) -> None:
        """Handle a record to its end. Raises HeadraceError (unavailable) when Kafka fails: then it isn't handled."""
        metrics.of(metrics.RECORDS, record.topic).inc()
        intake = None
        try:
            intake = await read_record(record, self._decoder, self._settings.grant_secret)
            await self._dispatch(intake)
        except (LeftUndone, Parked):
            raise
        except Exception as error:
            if isinstance(error, HeadraceError) and error.reason is Reason.UNAVAILABLE:
                raise
            log.exception("a record can't be handled", partition=record.partition, offset=record.offset)
            if intake is not None:
                await self._own_up(intake)
            await self._refusals.bury(record, Reason.INTERNAL_ERROR, f"{type(error).__name__} in admission")

    async def _dispatch(self, intake: Intake) -> None:
        record, grant = intake.record, intake.grant
        if grant is None:
            fault = intake.fault or intake.grant_fault
            assert fault is not None
            return await self._refusals.bury(record, fault.reason, fault.message, intake.event)
        await self._world.counts.learn(grant.reply.topic)
        await self._world.meet(grant.tenant, grant.key_id)
        if (unreachable := rules.reply_refusal(grant, self._world)) is not None:
            return await self._refusals.bury(record, unreachable.reason, unreachable.message, intake.event)
        if intake.fault is not None:
            return await self._refuse_fault(intake, grant, intake.fault)
        match intake.event:
            case InferenceRequested() | InferenceCancelled() | PayloadStored() if not await self._in_its_partition(
                record, grant
            ):
                return await self._rekey(intake, grant)
            case InferenceRequested():
                return await self._request(record, grant, intake.event)
            case PayloadStored():
                asked = self._case(record, grant, shortened(Large.known(intake.event), intake.timeout_ms))
                return await self._references.handle(asked, intake.event, child(record.headers))
            case InferenceCancelled():
                return await self._cancel(record, grant, intake.event)
            case _:
                text = f"{type(intake.event).__name__} doesn't belong on {record.topic}"
                return await self._refusals.bury(record, Reason.INVALID_REQUEST, text, intake.event)

    # --- a request ---------------------------------------------------------------------------------------------------

    async def _request(self, record: Record, grant: Grant, request: InferenceRequested) -> None:
        case = self._case(record, grant, request)
        held = self._turnstile.holds(grant.tenant, request.request_id)
        if case.keyed is None and held is not None and held.source != case.source:
            await self._refusals.asked_again(case, held.reply, child(record.headers))
            return
        try:
            async with self._deciding.of(id_name(grant.tenant, request.request_id)):
                await self._decide(case, len(record.value or b""), child(record.headers))
        except TooManyWait:  # a refusal would end the stream of the one that is being decided
            log.warning("too many ask with one id", request_id=request.request_id, tenant=grant.tenant)

    async def _decide(self, case: Case, size: int, trace: Headers) -> None:
        """What to do with a request by what was decided of it before; its id is held. `size` is its bytes."""
        grant, request, source = case.grant, case.request, case.source
        accounts = await self._ledgers.of(source.partition)
        if accounts is None:
            return  # the partition is another's now, and so is the record
        standing, verdict = accounts.standing(grant.tenant, request.request_id, source.offset)
        match standing:
            case Standing.NEW if case.keyed is not None:
                try:
                    async with self._deciding.of(f"key {grant.tenant} {case.keyed.key}"):
                        await self._answer(case, accounts, size, trace)
                except TooManyWait:
                    await self._refusals.reject(verdicts.rejected(case, _TOO_MANY), grant, trace)
            case Standing.NEW:
                await self._answer(case, accounts, size, trace)
            case Standing.REPEATED if isinstance(verdict, InferenceRejected):
                # Its stream is closed wherever that was told; whoever asks from elsewhere hears the same.
                await self._refusals.tell(verdict, grant, trace)
            case Standing.REDELIVERED if verdict is not None:
                await self._letting_in.again(case, verdict, trace)
            case Standing.REPEATED if await self._asked_before(case, accounts, trace):
                pass
            case Standing.REPEATED if isinstance(verdict, InferenceAdmitted):
                await self._refusals.asked_again(case, verdict.reply, trace)
            case _:
                log.info("asked again", request_id=request.request_id, standing=standing.value)

    async def _decided(self, tenant: str, request_id: str) -> bool:
        """Returns when nothing is being decided of a request that isn't wanted any more. If it waits for its turn, it does so no longer:
        whether it did.
        """
        waited = False
        while True:
            waited = self._turnstile.cancel(tenant, request_id) or waited
            try:
                async with asyncio.timeout(CANCEL_LOOK_S):
                    await self._deciding.free(id_name(tenant, request_id))
                    return waited
            except TimeoutError:
                pass
            except TooManyWait:
                async with self._patience.aside():
                    await asyncio.sleep(CANCEL_LOOK_S)

    async def _answer(self, asked: Case, accounts: Accounts | None, size: int, trace: Headers) -> None:
        """Decides, and once more if the log took that too late: then the partition may be another's, which decides by itself."""
        while accounts is not None:
            if await self._asked_before(asked, accounts, trace):
                return
            try:
                async with (deciding := self._judge.decided(asked, accounts, size)) as (case, found):
                    if not self._ledgers.current(asked.source.partition, accounts):
                        return  # whoever has the partition now decides
                    if found is not None:
                        await self._refusals.reject(verdicts.rejected(case, found), case.grant, trace)
                    elif (refusal := await self._letting_in.admit(case, accounts, trace, deciding.left)) is not None:
                        await self._refusals.take_back(verdicts.rejected(case, refusal), case.grant, trace)
                    return
            except Unwanted:
                return  # its cancel, which waits for this, tells so
            except TooLateError:
                log.warning("decided too late", request_id=asked.request.request_id, partition=asked.source.partition)
                accounts = await self._ledgers.of(asked.source.partition)

    async def _asked_before(self, case: Case, accounts: Accounts, trace: Headers) -> bool:
        """Whether a request is done with, since its key stands for one that was asked before, or its partition is gone."""
        found = await self._repeats.standing(case, accounts)
        if found is None:
            return True
        standing, first = found
        if first is None:
            return False
        if standing is KeyStanding.REPEAT:
            await self._repeats.join(case, first, trace)
            return True
        refusal = Refusal(Reason.CONFLICT, *conflict(case.request))
        if first.request_id != case.request.request_id:
            refused, _ = cases.refuse(case, "idempotency", refusal)
            await self._refusals.reject(verdicts.rejected(refused, refusal), case.grant, trace)
        elif first.reply != case.grant.reply:
            await self._refusals.tell(verdicts.rejected(case, refusal), case.grant, trace)
        else:  # a refusal would end the first's stream
            log.warning("another request has this id", request_id=first.request_id, tenant=case.grant.tenant)
        return True

    def _case(self, record: Record, grant: Grant, request: InferenceRequested) -> Case:
        return Case(
            request,
            grant,
            self._settings.tier,
            record.timestamp,
            Position(record.topic, record.partition, record.offset),
            self._settings.request_bytes_max,
            self._settings.worker_stale_ms,
            keyed=keyed(request, grant.reply),
        )

    async def _own_up(self, intake: Intake) -> None:
        """A bug has kept a request from being decided: its caller, who may wait, is told so, if the grant lets us."""
        record, grant, request = intake.record, intake.grant, intake.event
        if isinstance(request, PayloadStored):
            request = Large.known(request)
        if grant is None or not isinstance(request, InferenceRequested):
            return
        if rules.grant_refusal(grant, self._settings.tier, record.timestamp, self._world) is None:
            refusal = Refusal(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text)
            rejected = verdicts.rejected(self._case(record, grant, request), refusal)
            with contextlib.suppress(NoSuchPartition, RecordTooLarge):
                await self._refusals.take_back(rejected, grant, child(record.headers))

    # --- everything else ---------------------------------------------------------------------------------------------

    async def _cancel(self, record: Record, grant: Grant, event: InferenceCancelled) -> None:
        refusal = rules.cancel_refusal(event, grant, self._settings.tier, record.timestamp)
        if refusal is not None:
            return await self._refusals.bury(record, refusal.reason, refusal.message)
        waiting = self._turnstile.holds(grant.tenant, event.request_id)
        waited = await self._decided(grant.tenant, event.request_id)
        reply = waiting.reply if waiting is not None else await self._reply_of(record, grant, event)
        tier = self._settings.tier if reply is not None else ANY_TIER
        ending, word = verdicts.cancelled(event, grant, tier)
        records = cut_short(reply or grant.reply, ending, word)
        if waiting is not None and waited:
            told = verdicts.unwanted(event, grant.tenant, tier, waiting.model, waiting.source)
            records.append(Outgoing(LIFECYCLE, told, grant.tenant, record.partition))
        await deliver(self._producer, records, child(record.headers))
        return None

    async def _reply_of(self, record: Record, grant: Grant, event: InferenceCancelled) -> Reply | None:
        """Where the stream is that a cancel ends: where the request's own grant said, if this tier knows the request."""
        accounts = await self._ledgers.of(record.partition)
        return accounts.reply_of(grant.tenant, event.request_id) if accounts is not None else None

    async def _refuse_fault(self, intake: Intake, grant: Grant, fault: HeadraceError) -> None:
        """A record that is no event: its writer is told where his grant allows, and what nobody can tell apart is kept."""
        record, found = intake.record, salvage(intake.record, fault, intake.event)
        valid = rules.grant_refusal(grant, self._settings.tier, record.timestamp, self._world) is None
        if valid:
            position = Position(record.topic, record.partition, record.offset)
            rejected = InferenceRejected(
                found.request_id,
                grant.tenant,
                found.model,
                self._settings.tier,
                found.reason.value,
                fault.message[: verdicts.MESSAGE_CHARS_MAX],
                fault.param,
                requested_ms=record.timestamp,
                source=position,
            )
            await self._refusals.reject(rejected, grant, child(record.headers))
        if not (valid and found.request_id):
            await self._refusals.bury(record, fault.reason, fault.message)

    async def _in_its_partition(self, record: Record, grant: Grant) -> bool:
        return await self._partition_of(grant.tenant) in (record.partition, None)

    async def _partition_of(self, tenant: str) -> int | None:
        await self._world.counts.learn(self._topic)
        count = self._world.partitions(self._topic)
        return None if count is None else _partition(tenant, count)

    async def _rekey(self, intake: Intake, grant: Grant) -> None:
        """Send a record on, once, to the partition where its tenant's records are decided."""
        record = intake.record
        if intake.rekeyed:
            text = f"the record was sent on once and still isn't in the partition of its tenant on {record.topic}"
            return await self._refusals.bury(record, Reason.INVALID_REQUEST, text)
        headers = [*record.headers, (REKEYED_HEADER, str(record.partition).encode())]
        partition = await self._partition_of(grant.tenant)
        await (await self._producer.send_raw(record.topic, record.value, grant.tenant.encode(), partition, headers))
        return None


@lru_cache(maxsize=TENANTS_MAX)
def _partition(tenant: str, count: int) -> int:
    """Where the producers' own partitioner puts a tenant's records, of so many partitions."""
    partitions = list(range(count))
    return int(DefaultPartitioner()(tenant.encode(), partitions, partitions))
