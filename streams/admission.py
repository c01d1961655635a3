"""Admission acts: reads `requests.<tier>`, decides by `decisions.admission`, writes `work.*`, `lifecycle`, `tokens`.

Runs as one Faust app a tier. Each record is handled in its own task, so a long prompt that is being tokenised holds
nobody up, and its offset is acked, in order, when the broker has confirmed all that it caused. After a crash records are
handled again; ids derive from the input, so that changes nothing for readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import lru_cache

import structlog
from aiokafka.partitioner import DefaultPartitioner

from decisions import admission as rules
from decisions import cases, verdicts
from decisions.accounts import ANY_TIER, Accounts, Standing, Verdict, is_void
from decisions.cache import Entry, stream
from decisions.cases import Case, Refusal
from decisions.idempotency import KeyStanding, conflict, keyed
from infra import metrics
from infra.grants import Grant
from infra.log import EventDecoder, EventProducer, Headers, NoSuchPartition, RecordTooLarge
from infra.objects import StoreAway
from infra.settings import AdmissionSettings
from infra.tracing import child
from schemas.errors import HeadraceError
from schemas.events import (
    InferenceAdmitted,
    InferenceCancelled,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    PayloadStored,
    Position,
    Reply,
)
from schemas.payloads import may_be_large
from schemas.reasons import Reason
from schemas.topics import (
    INTERACTIVE,
    LIFECYCLE,
    REQUEST_MAX_BYTES,
    requests_topic,
)
from streams.accounts import Ledgers
from streams.alone import Alone, TooManyWait
from streams.cache import ResponseCache
from streams.faust_shell import LeftUndone, Parked, Record
from streams.idempotency import Repeats
from streams.intake import REKEYED_HEADER, Intake, read_record, salvage, shortened
from streams.judge import Judge
from streams.large import READ_WAIT_S, STORE_AWAY_TEXT, Claim, Large, Unread
from streams.lease import Lease
from streams.outbox import Outgoing, Together, cut_short, deliver
from streams.presence import Slots
from streams.refusals import Refusals
from streams.tokenizers import Tokenizers
from streams.turnstile import Turnstile, Unwanted
from streams.world import LiveWorld

CANCEL_LOOK_S = 0.2
"""A request that is still being fetched may come to wait for its turn after its cancel."""
RETRY_S, RETRIED_S = 1.0, 300.0
"""How often something that can't be done at present is tried, and for how long: a partition's commits wait for it."""
TENANTS_MAX = 4_096
"""Of so many it is remembered which partition is theirs."""

log = structlog.get_logger("streams.admission")


_TOO_MANY = Refusal(Reason.OVERLOADED, "Too many ask for the same thing at once. Try again later.", "request_id", 1_000)


def _over(verdict: InferenceAdmitted, until_s: float) -> bool:
    """Whether what was let in has been tried again for long enough: if its work isn't out, it hears at its deadline."""
    return time.monotonic() > until_s or time.time() * 1000 > verdict.deadline_ms


def _id_name(tenant: str, request_id: str) -> str:
    """What is decided of one request is decided at one place at a time."""
    return f"id {tenant} {request_id}"


class TooLateError(Exception):
    """The log took an admission when it was valid no more. Never leaves this room."""


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
        self._cache = cache
        self._lease = lease
        self._settings = settings
        self._producer = producer
        self._decoder = decoder
        self._world = world
        self._judge = Judge(world, tokenizers, ledgers, turnstile, cache, Slots(world, ledgers, producer))
        self._repeats = Repeats(world, producer, ledgers)
        self._large = Large(decoder, self._aside)
        self._refusals = Refusals(producer, world)
        self._topic = requests_topic(settings.tier)
        self._deciding = Alone(self._aside)

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
                return await self._by_reference(intake, grant, intake.event)
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
            await self._ask_again(case, held.reply, child(record.headers))
            return
        try:
            async with self._deciding.of(_id_name(grant.tenant, request.request_id)):
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
                await self._repeat(case, verdict, trace)
            case Standing.REPEATED if await self._asked_before(case, accounts, trace):
                pass
            case Standing.REPEATED if isinstance(verdict, InferenceAdmitted):
                await self._ask_again(case, verdict.reply, trace)
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
                    await self._deciding.free(_id_name(tenant, request_id))
                    return waited
            except TimeoutError:
                pass
            except TooManyWait:
                async with self._aside():
                    await asyncio.sleep(CANCEL_LOOK_S)

    async def _ask_again(self, case: Case, reply: Reply, trace: Headers) -> None:
        """Its stream is where the first asked to have it."""
        log.info("asked again", request_id=case.request.request_id)
        if reply != case.grant.reply:
            refusal = Refusal(Reason.CONFLICT, "another request of this tenant has this id", "request_id")
            await self._refusals.tell(verdicts.rejected(case, refusal), case.grant, trace)

    async def _a_while(self, partition: int) -> None:
        """Before something that can't be done at present is tried again. Raises LeftUndone if the partition goes meanwhile."""
        async with self._aside():
            await asyncio.sleep(RETRY_S)
        if await self._ledgers.of(partition) is None:
            raise LeftUndone

    def _aside(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What waits for another to be decided takes no place among the records that are handled: that one may be held back for long."""
        reading = self._turnstile.reading
        return reading.aside() if reading is not None else contextlib.nullcontext()

    async def _by_reference(self, intake: Intake, grant: Grant, reference: PayloadStored) -> None:
        """A request that is in the object store: nothing of it is read for a caller who may not ask."""
        record, trace = intake.record, child(intake.record.headers)
        refusal = rules.grant_refusal(grant, self._settings.tier, record.timestamp, self._world)
        asked = self._case(record, grant, shortened(self._large.known(reference), intake.timeout_ms))
        claim: Claim | None = None
        try:
            if refusal is None and not await self._may_wait_unread(asked, reference):
                return None
            claim = await self._until_roomy(record.partition)
            async with self._deciding.of(_id_name(grant.tenant, reference.request_id)):
                return await self._fetched(asked, grant, reference, refusal, trace, claim)
        except Unread as unread:
            return await self._refusals.reject(verdicts.rejected(asked, unread.refusal), grant, trace)
        except TooManyWait:  # a refusal would end the stream of the one that is being decided
            log.warning("too many ask with one id", request_id=reference.request_id, tenant=grant.tenant)
            return None
        finally:
            if claim is not None:
                claim.end()

    async def _may_wait_unread(self, asked: Case, reference: PayloadStored) -> bool:
        """Nobody watches a batch request: a new one isn't fetched before its turn is near. Raises Parked, or Unread; False if its partition is gone."""
        source, tenant, name = asked.source, asked.grant.tenant, reference.request_id
        accounts = await self._ledgers.of(source.partition)
        if accounts is None:
            return False
        if accounts.standing(tenant, name, source.offset)[0] is not Standing.NEW:
            return True
        if (found := await self._repeats.standing(asked, accounts)) is None:
            return False
        size = max(0, min(reference.size_bytes, REQUEST_MAX_BYTES))
        decided_now = self._deciding.held(_id_name(tenant, name))
        first = found[1] is None and not decided_now and self._turnstile.holds(tenant, name) is None
        self._turnstile.park_unread(asked, size, roomy=self._roomy(source.partition), first=first)
        return True

    def _roomy(self, partition: int) -> bool:
        """Whether what is held, or being fetched, of a batch partition leaves room for one more to be fetched."""
        return self._settings.tier == INTERACTIVE or not (self._turnstile.full(partition) or self._large.busy)

    async def _until_roomy(self, partition: int) -> Claim:
        """One that was parked already, or isn't new, waits here."""
        while not self._roomy(partition):
            await self._a_while(partition)
        return Claim(self._large)

    async def _fetched(
        self,
        asked: Case,
        grant: Grant,
        reference: PayloadStored,
        refused: Refusal | None,
        trace: Headers,
        claim: Claim,
    ) -> None:
        """Raises `Unread` for what can't be had, or may not be asked. What was let in before is told nothing of that: its stream goes on."""
        partition = asked.source.partition
        accounts = await self._ledgers.of(partition)
        if accounts is None:
            return None
        standing, verdict = accounts.standing(grant.tenant, reference.request_id, asked.source.offset)
        known = accounts.reply_of(grant.tenant, reference.request_id)
        if standing is Standing.ENDED:
            return None
        if refused is not None and known is not None and standing is Standing.REPEATED:
            return await self._ask_again(asked, known, trace)
        if refused is not None and (known is None or standing is Standing.NEW):
            raise Unread(refused)
        until_s, wait_s = time.monotonic() + RETRIED_S, READ_WAIT_S if self._settings.tier == INTERACTIVE else RETRIED_S
        while True:
            try:
                request = await self._large.read(reference, grant.tenant, wait_s)
            except Unread as unread:
                if known is not None and standing is Standing.REPEATED:
                    return await self._ask_again(asked, known, trace)
                if standing is not Standing.REDELIVERED or not isinstance(verdict, InferenceAdmitted):
                    raise
                text = unread.refusal.message
                log.warning("its work can't be sent again", request_id=verdict.request_id, reason=text)
                if not unread.refusal.reason.retriable or _over(verdict, until_s):
                    return None
                await self._a_while(partition)
            else:
                claim.end()
                request = shortened(request, asked.request.timeout_ms)
                return await self._decide(
                    replace(asked, request=request, keyed=keyed(request, grant.reply)), reference.size_bytes, trace
                )

    async def _answer(self, asked: Case, accounts: Accounts | None, size: int, trace: Headers) -> None:
        """Decides, and once more if the log took that too late: then the partition may be another's, which decides by itself."""
        while accounts is not None:
            if await self._asked_before(asked, accounts, trace):
                return
            try:
                async with self._judge.decided(asked, accounts, size) as (case, found):
                    if not self._ledgers.current(asked.source.partition, accounts):
                        return  # whoever has the partition now decides
                    if found is not None:
                        await self._refusals.reject(verdicts.rejected(case, found), case.grant, trace)
                    elif (refusal := await self._admit(case, accounts, trace)) is not None:
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

    async def _repeat(self, case: Case, verdict: Verdict, trace: Headers) -> None:
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
                if error.reason is not Reason.OVERLOADED or _over(verdict, until_s):
                    log.warning("its work can't be sent again", request_id=verdict.request_id, reason=error.message)
                    return None
            await self._a_while(case.source.partition)
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
                    if _over(verdict, until_s):
                        return None
                    await self._a_while(case.source.partition)
            await self._repeats.remember(verdict, None, trace)
        return None

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
            request = self._large.known(request)
        if grant is None or not isinstance(request, InferenceRequested):
            return
        if rules.grant_refusal(grant, self._settings.tier, record.timestamp, self._world) is None:
            refusal = Refusal(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text)
            rejected = verdicts.rejected(self._case(record, grant, request), refusal)
            with contextlib.suppress(NoSuchPartition, RecordTooLarge):
                await self._refusals.take_back(rejected, grant, child(record.headers))

    async def _admit(self, case: Case, accounts: Accounts, trace: Headers) -> Refusal | None:
        """No pause between the checks and the reservation: the next request is judged with it."""
        scheduled, admitted = verdicts.admitted(case, self._lease.until_ms if case.told_first else 0)
        entry = case.entry if admitted.cached else None
        topic, partition = admitted.work_topic, admitted.work_partition
        assert case.reserved is not None
        accounts.take(case.reserved, admitted)
        if entry is None:
            self._world.placed(topic, partition)
            self._cache.went(scheduled, partition)
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


def _caused(
    work: InferenceScheduled, admitted: InferenceAdmitted, entry: Entry | None, age_ms: int
) -> Outgoing | Together:
    """What follows from letting a request in: work, or at once the whole stream that the response cache has of it."""
    if entry is None:
        return Outgoing(admitted.work_topic, work, work.request_id, admitted.work_partition)
    events, reply = stream(entry.answer, work, age_ms), work.reply
    return Together(reply.topic, events, work.request_id, reply.partition, reply.encoding)
