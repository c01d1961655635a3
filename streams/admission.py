"""Admission acts: reads `requests.<tier>`, decides by `decisions.admission`, writes `work.*`, `lifecycle`, `tokens`.

Runs as one Faust app a tier. Each record is handled in its own task, so a long prompt that is being tokenised holds
nobody up, and its offset is acked, in order, when the broker has confirmed all that it caused. After a crash records are
handled again; ids derive from the input, so that changes nothing for readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import structlog
from aiokafka.partitioner import DefaultPartitioner

from decisions import admission as rules
from decisions.accounts import Accounts, Standing, Verdict, is_void
from decisions.admission import Case, Refusal
from infra import metrics
from infra.dead_letters import dead_letter
from infra.grants import Grant
from infra.log import EventDecoder, EventProducer, Headers, NoSuchPartition, RecordTooLarge
from infra.reach import until_reached
from infra.settings import AdmissionSettings
from infra.telemetry import OpsServer
from infra.tracing import child
from schemas.errors import HeadraceError
from schemas.events import (
    InferenceAdmitted,
    InferenceCancelled,
    InferenceRejected,
    InferenceRequested,
    ModelVersionRegistered,
    Position,
    Reply,
)
from schemas.reasons import Reason
from schemas.topics import (
    CONTROL,
    DEAD_LETTERS,
    LIFECYCLE,
    REGISTRY,
    SCHEMAS,
    TENANTS,
    TOKENS,
    WORKERS,
    ledger_topic,
    requests_topic,
)
from streams.accounts import Ledgers
from streams.faust_shell import FaustShell, Record
from streams.intake import REKEYED_HEADER, Intake, read_record, salvage
from streams.judge import Judge
from streams.lease import Lease
from streams.outbox import Outgoing, deliver, reply_to
from streams.tokenizers import Tokenizers
from streams.world import LiveWorld

PROCESS = "admission"
TOPICS = (TENANTS, REGISTRY, WORKERS, SCHEMAS, TOKENS, LIFECYCLE, CONTROL, DEAD_LETTERS)
"""What must be there beside the requests."""
OPEN_MAX = 256
"""Records handled at once, over all partitions."""

log = structlog.get_logger("streams.admission")


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
    ) -> None:
        self._ledgers = ledgers
        self._lease = lease
        self._settings = settings
        self._producer = producer
        self._decoder = decoder
        self._world = world
        self._judge = Judge(world, tokenizers, ledgers)
        self._topic = requests_topic(settings.tier)
        self._partitioner = DefaultPartitioner()
        self._open: dict[str, asyncio.Event] = {}

    async def handle(self, record: Record) -> None:
        """Handle a record to its end. Raises HeadraceError (unavailable) when Kafka fails: then it isn't handled."""
        metrics.RECORDS.labels(record.topic).inc()
        intake = None
        try:
            intake = await read_record(record, self._decoder, self._settings.grant_secret)
            await self._dispatch(intake)
        except Exception as error:
            if isinstance(error, HeadraceError) and error.reason is Reason.UNAVAILABLE:
                raise
            log.exception("a record can't be handled", partition=record.partition, offset=record.offset)
            if intake is not None:
                await self._own_up(intake)
            await self._bury(record, Reason.INTERNAL_ERROR, f"{type(error).__name__} in admission")

    async def _dispatch(self, intake: Intake) -> None:
        record, grant = intake.record, intake.grant
        if grant is None:
            fault = intake.fault or intake.grant_fault
            assert fault is not None
            return await self._bury(record, fault.reason, fault.message)
        await self._world.counts.learn(grant.reply.topic)
        await self._world.meet(grant.tenant, grant.key_id)
        if (unreachable := rules.reply_refusal(grant, self._world)) is not None:
            return await self._bury(record, unreachable.reason, unreachable.message)
        if intake.fault is not None:
            return await self._refuse_fault(intake, grant, intake.fault)
        match intake.event:
            case InferenceRequested() | InferenceCancelled() if not await self._in_its_partition(record, grant):
                return await self._rekey(intake, grant)
            case InferenceRequested():
                return await self._request(record, grant, intake.event)
            case InferenceCancelled():
                return await self._cancel(record, grant, intake.event)
            case _:
                name = type(intake.event).__name__
                return await self._bury(record, Reason.INVALID_REQUEST, f"{name} doesn't belong on {record.topic}")

    # --- a request ---------------------------------------------------------------------------------------------------

    async def _request(self, record: Record, grant: Grant, request: InferenceRequested) -> None:
        case, trace = self._case(record, grant, request), child(record.headers)
        while (deciding := self._open.get(request.request_id)) is not None:
            await deciding.wait()
        with self._opened(request.request_id):
            accounts = await self._ledgers.of(record.partition)
            if accounts is None:
                return  # the partition is another's now, and so is the record
            standing, verdict = accounts.standing(grant.tenant, request.request_id, record.offset)
            match standing:
                case Standing.NEW:
                    await self._answer(case, accounts, trace)
                case Standing.REPEATED if isinstance(verdict, InferenceRejected):
                    # Its stream is closed wherever that was told; whoever asks from elsewhere hears the same.
                    await self._tell(verdict, grant, trace)
                case Standing.REDELIVERED if verdict is not None:
                    await self._repeat(case, verdict, trace)
                case Standing.REPEATED if isinstance(verdict, InferenceAdmitted) and verdict.reply != grant.reply:
                    conflict = Refusal(Reason.CONFLICT, "another request of this tenant has this id", "request_id")
                    await self._tell(rules.rejected(case, conflict), grant, trace)
                case _:
                    log.info("asked again", request_id=request.request_id, standing=standing.value)

    async def _answer(self, asked: Case, accounts: Accounts | None, trace: Headers) -> None:
        """Decides, and once more if the log took that too late: then the partition may be another's, which decides by itself."""
        while accounts is not None:
            case, refusal = await self._judge.decide(asked)
            if not self._ledgers.current(asked.source.partition, accounts):
                return  # whoever has the partition now decides
            try:
                if refusal is None:
                    refusal = await self._admit(case, accounts, trace)
                if refusal is not None:
                    await self._reject(rules.rejected(case, refusal), case.grant, trace)
                return
            except TooLateError:
                log.warning("decided too late", request_id=asked.request.request_id, partition=asked.source.partition)
                accounts = await self._ledgers.of(asked.source.partition)

    async def _repeat(self, case: Case, verdict: Verdict, trace: Headers) -> None:
        """What was decided of this record before a crash, told again; its work is the same, and goes to the same place."""
        if isinstance(verdict, InferenceRejected):
            return await self._reject(verdict, case.grant, trace)
        version = self._world.models.version(verdict.model, verdict.version)
        if version is None:
            refusal = Refusal(Reason.MODEL_NOT_FOUND, f"The model `{verdict.model}` is gone.", "model")
            return await self._reject(rules.rejected(case, refusal), case.grant, trace)
        try:
            case = await self._judge.tokenise(case, version)
        except HeadraceError as error:
            refusal = Refusal(error.reason, error.message, error.param)
            return await self._reject(rules.rejected(case, refusal), case.grant, trace)
        scheduled, _ = rules.admitted(rules.as_decided(case, verdict, version, self._world))
        work = Outgoing(verdict.work_topic, scheduled, scheduled.request_id, verdict.work_partition)
        with contextlib.suppress(
            NoSuchPartition, RecordTooLarge
        ):  # it was not taken the first time either, and its caller was told
            await deliver(self._producer, [work], trace)
        return None

    def _case(self, record: Record, grant: Grant, request: InferenceRequested) -> Case:
        return Case(
            request,
            grant,
            self._settings.tier,
            record.timestamp,
            Position(record.topic, record.partition, record.offset),
            self._settings.inline_bytes_max,
            self._settings.worker_stale_ms,
        )

    async def _own_up(self, intake: Intake) -> None:
        """A bug has kept a request from being decided: its caller, who may wait, is told so, if the grant lets us."""
        record, grant, request = intake.record, intake.grant, intake.event
        if grant is None or not isinstance(request, InferenceRequested):
            return
        if rules.grant_refusal(grant, self._settings.tier, record.timestamp, self._world) is None:
            refusal = Refusal(Reason.INTERNAL_ERROR, Reason.INTERNAL_ERROR.text)
            rejected = rules.rejected(self._case(record, grant, request), refusal)
            with contextlib.suppress(NoSuchPartition, RecordTooLarge):
                await self._reject(rejected, grant, child(record.headers))

    async def _admit(self, case: Case, accounts: Accounts, trace: Headers) -> Refusal | None:
        """No pause between the checks and the reservation: the next request is judged with it."""
        scheduled, admitted = rules.admitted(case)
        if case.limited:
            admitted = replace(admitted, valid_until_ms=self._lease.until_ms)
        topic, partition = admitted.work_topic, admitted.work_partition
        assert case.reserved is not None
        accounts.take(case.reserved, admitted)
        self._world.placed(topic, partition)
        work_of = Outgoing(topic, scheduled, scheduled.request_id, partition)
        told = Outgoing(LIFECYCLE, admitted, admitted.tenant, case.source.partition)
        try:
            if case.limited:  # no work without its reservation, whatever crashes
                (taken,) = await deliver(self._producer, [told], trace)
                self._lease.heard(taken.timestamp)
                if is_void(admitted, taken.timestamp):
                    raise TooLateError
                (work,) = await deliver(self._producer, [work_of], trace)
            else:
                work, _ = await deliver(self._producer, [work_of, told], trace)
        except BaseException as error:
            accounts.withdraw(admitted)
            self._world.withdrawn(topic, partition)
            if isinstance(error, RecordTooLarge):
                return Refusal(error.reason, error.message)
            if isinstance(error, NoSuchPartition):
                return Refusal(Reason.UNAVAILABLE, error.message, "model")
            raise
        self._world.confirmed(topic, partition, work.offset)
        return None

    async def _tell(self, rejected: InferenceRejected, grant: Grant, trace: Headers) -> None:
        """A refusal for the caller alone: the request of that id goes on."""
        await deliver(self._producer, [reply_to(grant.reply, rejected, rejected.request_id)], trace)

    async def _reject(self, rejected: InferenceRejected, grant: rules.Grant, trace: Headers) -> None:
        # A name that a caller made up is no label: their number has no limit.
        model = rejected.model if self._world.stable(rejected.model) is not None else ""
        metrics.REQUESTS.labels(model, "", rejected.tier, rejected.reason).inc()
        records = [reply_to(grant.reply, rejected, rejected.request_id), Outgoing(LIFECYCLE, rejected, rejected.tenant)]
        await deliver(self._producer, records, trace)

    @contextlib.contextmanager
    def _opened(self, request_id: str) -> Iterator[None]:
        """While a request is being decided, its cancel waits."""
        closed = self._open.setdefault(request_id, asyncio.Event())
        try:
            yield
        finally:
            closed.set()
            self._open.pop(request_id, None)

    # --- everything else ---------------------------------------------------------------------------------------------

    async def _cancel(self, record: Record, grant: Grant, event: InferenceCancelled) -> None:
        refusal = rules.cancel_refusal(event, grant, self._settings.tier, record.timestamp)
        if refusal is not None:
            return await self._bury(record, refusal.reason, refusal.message)
        if (deciding := self._open.get(event.request_id)) is not None:
            await deciding.wait()
        ending, word = rules.cancelled(event, grant, self._settings.tier)
        records = [
            reply_to(await self._reply_of(record, grant, event), ending, ending.request_id),
            Outgoing(CONTROL, word, word.request_id),
        ]
        await deliver(self._producer, records, child(record.headers))
        return None

    async def _reply_of(self, record: Record, grant: Grant, event: InferenceCancelled) -> Reply:
        """Where the stream is that a cancel ends: where the request's own grant said, as far as is known."""
        accounts = await self._ledgers.of(record.partition)
        return (accounts.reply_of(grant.tenant, event.request_id) if accounts is not None else None) or grant.reply

    async def _refuse_fault(self, intake: Intake, grant: Grant, fault: HeadraceError) -> None:
        """A record that is no event: its writer is told where his grant allows, and what nobody can tell apart is kept."""
        record, found = intake.record, salvage(intake.record, fault)
        valid = rules.grant_refusal(grant, self._settings.tier, record.timestamp, self._world) is None
        if valid:
            position = Position(record.topic, record.partition, record.offset)
            rejected = InferenceRejected(
                found.request_id,
                grant.tenant,
                found.model,
                self._settings.tier,
                found.reason.value,
                fault.message[: rules.MESSAGE_CHARS_MAX],
                fault.param,
                requested_ms=record.timestamp,
                source=position,
            )
            await self._reject(rejected, grant, child(record.headers))
        if not (valid and found.request_id):
            await self._bury(record, fault.reason, fault.message)

    async def _in_its_partition(self, record: Record, grant: Grant) -> bool:
        return await self._partition_of(grant.tenant) in (record.partition, None)

    async def _partition_of(self, tenant: str) -> int | None:
        await self._world.counts.learn(self._topic)
        count = self._world.partitions(self._topic)
        if count is None:
            return None
        partitions = list(range(count))
        return int(self._partitioner(tenant.encode(), partitions, partitions))

    async def _rekey(self, intake: Intake, grant: Grant) -> None:
        """Send a record on, once, to the partition where its tenant's records are decided."""
        record = intake.record
        if intake.rekeyed:
            text = f"the record was sent on once and still isn't in the partition of its tenant on {record.topic}"
            return await self._bury(record, Reason.INVALID_REQUEST, text)
        headers = [*record.headers, (REKEYED_HEADER, str(record.partition).encode())]
        partition = await self._partition_of(grant.tenant)
        await (await self._producer.send_raw(record.topic, record.value, grant.tenant.encode(), partition, headers))
        return None

    async def _bury(self, record: Record, reason: Reason, message: str) -> None:
        log.warning(
            "dead-lettered", topic=record.topic, partition=record.partition, offset=record.offset, reason=reason.value
        )
        await dead_letter(self._producer, record, reason.value, message[: rules.MESSAGE_CHARS_MAX], PROCESS)


async def run(settings: AdmissionSettings, stop: asyncio.Event) -> None:
    """Run admission for one tier until `stop` is set. Raises what makes it impossible to go on."""
    topic = requests_topic(settings.tier)
    producer, decoder = EventProducer(settings.kafka, PROCESS), EventDecoder(settings.kafka)
    world, tokenizers = LiveWorld(settings.kafka), Tokenizers(settings.tokenise_threads)
    ledgers = Ledgers(settings.kafka, settings.tier, producer, decoder)
    world.ledgers = ledgers
    lease = Lease(settings.session_timeout_ms)
    admission = Admission(settings, producer, decoder, world, tokenizers, ledgers, lease)
    shell = FaustShell(settings, topic, f"admission.{settings.tier}", admission.handle, OPEN_MAX, lease, ledgers)
    waiting: str | None = "connecting"

    def wait(missing: str) -> None:
        nonlocal waiting
        waiting = missing

    def not_ready() -> str | None:
        return waiting or shell.not_ready or ledgers.not_ready or producer.failure or world.failure

    ops = OpsServer(settings.ops_port, not_ready)
    async with contextlib.AsyncExitStack() as cleanup:
        await ops.start()
        cleanup.push_async_callback(ops.stop)
        if not await until_reached(settings.kafka, (topic, ledger_topic(settings.tier), *TOPICS), stop, wait):
            return
        wait("the directories aren't read yet")
        await asyncio.gather(producer.start(), world.start())
        cleanup.push_async_callback(producer.stop)
        cleanup.push_async_callback(world.stop)
        cleanup.callback(tokenizers.close)
        waiting = None
        warm = [asyncio.ensure_future(_warm(tokenizers, version)) for version in world.models.all()]
        await asyncio.gather(*warm)
        await world.counts.learn(topic)
        ledgers.start(shell.committed, lease)
        cleanup.push_async_callback(ledgers.stop)
        cleanup.push_async_callback(shell.stop)
        await shell.start()
        log.info("admission runs", tier=settings.tier)
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        watched: list[asyncio.Future[Any]] = [shell.failed, *ledgers.tasks]
        done, _ = await asyncio.wait([stopping, *watched], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for ended in done - {stopping}:
            ended.result()


async def _warm(tokenizers: Tokenizers, version: ModelVersionRegistered) -> None:
    """A model whose tokenizer can't be read fails its own requests, not the tier."""
    try:
        await tokenizers.get(version)
    except HeadraceError as error:
        log.error("a tokenizer can't be read", model=version.model, version=version.version, message=error.message)
