"""One model version's way through the log, for tests: registers it, schedules work, reads and folds its answers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decisions.stream import NEW, Input, StreamState, fold
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer
from infra.read import assign_all, read_to_end
from infra.settings import KafkaSettings, WorkerSettings
from infra.topics import ensure_model
from schemas.errors import Undecodable
from schemas.events import (
    Event,
    GenerationStarted,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceScheduled,
    ModelVersionRegistered,
    Reply,
    Sampling,
    TokensGenerated,
    WorkerReported,
)
from schemas.ids import request_id
from schemas.topics import CONTROL, REGISTRY, TOKENS, WORKERS, work_topic
from workers.main import run

WAIT_S = 40.0
LOOK_PAUSE_S = 0.1
"""Each look makes a consumer, which takes a while of a core."""
PARTITIONS = 8
ROOT = Path(__file__).parents[2]


@dataclass
class Read:
    """What the log says of one request."""

    state: StreamState = NEW
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    counted: list[Event] = field(default_factory=list)
    ignored: list[Event] = field(default_factory=list)
    headers: list[dict[str, bytes]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def ending(self) -> InferenceCompleted | InferenceFailed:
        found = [e for e in self.counted if isinstance(e, (InferenceCompleted, InferenceFailed))]
        assert len(found) == 1
        return found[0]

    @property
    def starts(self) -> list[GenerationStarted]:
        return [e for e in self.counted if isinstance(e, GenerationStarted)]

    def apply(self, event: Any) -> bool:
        """Whether it counted."""
        self.state, counted = fold(self.state, event)
        (self.counted if counted else self.ignored).append(event)
        if not counted:
            return False
        if isinstance(event, TokensGenerated):
            self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
            self.ids.setdefault(event.choice, []).extend(event.token_ids)
        if isinstance(event, InferenceCompleted):
            for end in event.choices:
                self.texts[end.choice] = self.texts.get(end.choice, "") + end.text
        return True


class Lane:
    """One scripted model version with topics of its own."""

    def __init__(self, kafka: KafkaSettings, producer: EventProducer, version: ModelVersionRegistered) -> None:
        self.kafka = kafka
        self.producer = producer
        self.version = version
        self.last_worker_id = ""
        self.started: list[str] = []
        self.events: list[Event] = []  # what counted, in the order of each partition
        self._decoder = EventDecoder(kafka)
        self._positions: dict[Any, int] = {}
        self._reports: dict[bytes, list[bytes]] = {}
        self._reads: dict[str, Read] = {}

    def settings(self, **overrides: Any) -> WorkerSettings:
        values = {"session_timeout_ms": 6_000, "report_interval_ms": 300, **overrides}
        return WorkerSettings(kafka=self.kafka, worker_id=f"w-{secrets.token_hex(4)}", **values)

    async def ask(
        self,
        prompt: str | dict[str, Any],
        *,
        partition: int = 0,
        tier: str = "interactive",
        timeout_ms: int = 60_000,
        **more: Any,
    ) -> str:
        """Schedules a request; returns its id."""
        now_ms = int(time.time() * 1000)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        rid = more.pop("rid", None) or request_id(now_ms, secrets.token_bytes(10))
        sampling = more.pop("sampling", Sampling(max_tokens=more.pop("max_tokens", 4_000)))
        reply = more.pop("reply", Reply(TOKENS, sum(rid.encode()) % PARTITIONS))
        event = InferenceScheduled(
            rid, more.pop("tenant", "acme"), self.version.model, self.version.version, tier, tuple(text.encode()), sampling, now_ms + timeout_ms,
            more.pop("requested_ms", now_ms), reply, "salt", more.pop("stream", True),
        )  # fmt: skip
        await self.producer.send_and_wait(self.topic(tier), event, partition=partition, key=rid, **more)
        return rid

    async def cancel(self, *rids: str, tenant: str = "acme") -> None:
        """Tells workers that these aren't wanted any more."""
        for rid in rids:
            await self.producer.send_and_wait(CONTROL, InferenceCancelled(rid, tenant), key=rid)

    def topic(self, tier: str = "interactive") -> str:
        return work_topic(self.version.model, self.version.version, tier)

    async def stand_at_end(self) -> None:
        """Reads from here on: what other tests wrote before could take longer than an answer lasts."""
        for topic in (TOKENS, WORKERS):
            consumer = make_consumer(self.kafka)
            await consumer.start()
            try:
                self._positions |= await assign_all(consumer, topic)
            finally:
                await consumer.stop()

    async def pull(self) -> None:
        """Reads what is new on `tokens`."""
        async for record in read_to_end(self.kafka, TOKENS, self._positions):
            try:
                event = await self._decoder.decode(record.value)
            except Undecodable:
                continue
            if not isinstance(event, Input):  # other tests write junk here
                continue
            read = self._reads.setdefault(event.request_id, Read())
            if isinstance(event, GenerationStarted):
                self.started.append(event.request_id)
            read.headers.append(dict(record.headers))
            if read.apply(event):
                self.events.append(event)

    async def read(self, rid: str) -> Read:
        await self.pull()
        return self._reads.setdefault(rid, Read())

    async def until_closed(self, *rids: str, wait_s: float = WAIT_S) -> list[Read]:
        async with asyncio.timeout(wait_s):
            while await self.any_open(*rids):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_PAUSE_S)
        return [self._reads[rid] for rid in rids]

    async def any_open(self, *rids: str) -> bool:
        """Whether one of them has no ending yet."""
        await self.pull()
        return any(rid not in self._reads or self._reads[rid].state.closed is None for rid in rids)

    async def until_tokens(self, rid: str, count: int) -> Read:
        async with asyncio.timeout(WAIT_S):
            while sum((read := await self.read(rid)).state.accepted) < count:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_PAUSE_S)
        return read

    async def reports(self, worker_id: str) -> list[WorkerReported]:
        """All of a worker's, as of now."""
        async for record in read_to_end(self.kafka, WORKERS, self._positions):
            if record.value is not None:
                self._reports.setdefault(record.key, []).append(record.value)
        found = []
        for value in self._reports.get(worker_id.encode(), ()):
            event = await self._decoder.decode(value)
            assert isinstance(event, WorkerReported)
            found.append(event)
        return found

    async def until_ready(self, worker_id: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(r.state == "ready" and r.partitions for r in await self.reports(worker_id)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def worker(self, **overrides: Any) -> AsyncIterator[asyncio.Event]:
        """A worker in this process, until the block ends; yields its stop event."""
        stop, settings = asyncio.Event(), self.settings(**overrides)
        self.last_worker_id = settings.worker_id
        task = asyncio.create_task(run(settings, self.version.model, self.version.version, stop))
        waiting = asyncio.create_task(self.until_ready(settings.worker_id))
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if task.done():
                task.result()
            await waiting
            yield stop
        finally:
            waiting.cancel()
            stop.set()
            await task

    def spawn(self, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """A worker as a process of its own."""
        own = {"HEADRACE_WORKER_SESSION_TIMEOUT_MS": "6000", "HEADRACE_WORKER_REPORT_INTERVAL_MS": "300", **env}
        command = [
            sys.executable,
            str(Path(__file__).with_name("worker_process.py")),
            self.version.model,
            self.version.version,
        ]
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.kafka.to_env(), **own},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


@asynccontextmanager
async def open_lane(kafka: KafkaSettings, **changes: Any) -> AsyncIterator[Lane]:
    """A new scripted model version."""
    name = f"m-{secrets.token_hex(4)}"
    values = {"slots": 4, "partitions": 1, "context_length": 100_000, "tiers": ("interactive", "batch"), **changes}
    version = ModelVersionRegistered(name, "1", "scripted", "scripted", tokenizer="bytes", **values)
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        await ensure_model(kafka, version)
        await producer.send_and_wait(REGISTRY, version, key=name)
        lane = Lane(kafka, producer, version)
        await lane.stand_at_end()
        yield lane
    finally:
        await producer.stop()
