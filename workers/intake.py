"""Turns a record into work, or puts it aside: what can't be decoded or answered must not hold up what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog
from aiokafka import ConsumerRecord

from decisions.window import Waiting
from infra.dead_letters import dead_letter
from infra.log import EventDecoder, EventProducer
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event, InferenceScheduled, ModelVersionRegistered, PayloadStored
from schemas.payloads import PayloadUnreadable
from schemas.topics import GRANT_HEADER
from workers.group import Held
from workers.retry import persist
from workers.work import RequestKey, Work, refusal, tell_and_wait

log = structlog.get_logger("worker")

PROCESS = "worker"


class Intake:
    """`unwanted` says of a request that it must not run: it is held already, or its caller cancelled it."""

    def __init__(
        self,
        version: ModelVersionRegistered,
        producer: EventProducer,
        decoder: EventDecoder,
        unwanted: Callable[[RequestKey], bool],
    ) -> None:
        """Takes records of this version's work topics."""
        self._version = version
        self._producer = producer
        self._decoder = decoder
        self._unwanted = unwanted
        self._taken = 0

    async def open(self, held: Held, record: ConsumerRecord[bytes, bytes]) -> Work | None:
        """The work in a record; None if there is nothing to do, and then the record is finished."""
        event: Event | None = None
        try:
            event = await persist(lambda: self._decoder.decode_record(record.value))
            if isinstance(event, PayloadStored):
                event = await self._decoder.follow(event)
            if not isinstance(event, InferenceScheduled):
                raise Undecodable(f"{type(event).__name__} is no work")
            if (event.model, event.version) != (self._version.model, self._version.version):
                raise Undecodable(f"it is for {event.model} {event.version}")
        except PayloadUnreadable as error:
            await self._give_up(held, record, error)
            return None
        except Undecodable as error:
            await self.put_aside(record, error.reason.value, error.message, event)
            return None
        self._taken += 1
        headers = tuple((name, value) for name, value in record.headers if name != GRANT_HEADER)
        waiting = Waiting(event.tier, event.tenant, event.deadline_ms, self._taken, slots=event.sampling.n)
        work = Work(held, record, event, headers, waiting)
        return None if self._unwanted(work.key) else work

    async def _give_up(self, held: Held, record: ConsumerRecord[bytes, bytes], error: PayloadUnreadable) -> None:
        """Ends a request whose work can't be fetched, as far as the record tells whose it is; whoever may have begun it can't go on either."""
        asked = error.outline
        if not isinstance(asked, InferenceScheduled):
            await self.put_aside(record, error.reason.value, error.message)
            return
        headers = tuple((name, value) for name, value in record.headers if name != GRANT_HEADER)
        work = Work(held, record, asked, headers, Waiting(asked.tier, asked.tenant, asked.deadline_ms, self._taken))
        if self._unwanted(work.key):
            return
        failed = replace(refusal(asked, error.reason, error.message), if_not_started=False)
        try:
            await persist(lambda: tell_and_wait(self._producer, work, failed))
        except HeadraceError as untold:
            await self.bury(work, untold)

    async def put_aside(self, record: Any, reason: str, message: str, event: object = None) -> None:
        """Dead-letters a record; returns when the broker has it."""
        await persist(lambda: dead_letter(self._producer, record, reason, message, PROCESS, event))

    async def bury(self, work: Work, error: HeadraceError) -> None:
        """Puts work aside that can't be answered at all: its `tokens` partition doesn't exist, or takes no such record."""
        log.error("a request can't be answered", request_id=work.scheduled.request_id, message=error.message)
        await self.put_aside(work.record, error.reason.value, error.message)
