"""A tenant, a model and agents on a real broker, for tests: writes requests and stream events, reads what they cause."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiokafka import ConsumerRecord, TopicPartition

from infra.grants import Grant, mint
from infra.kafka import make_consumer, partitions_of
from infra.log import EventDecoder, EventProducer
from infra.objects import DEFAULT_FOLDER
from infra.ports import free_port
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.errors import Undecodable
from schemas.events import (
    ApiKey,
    Event,
    InferenceRejected,
    InferenceRequested,
    ModelPromoted,
    ModelVersionRegistered,
    RecordDeadLettered,
    Reply,
    TenantChanged,
)
from schemas.ids import request_id
from schemas.topics import (
    ANSWERS,
    CONTROL,
    DEAD_LETTERS,
    GRANT_HEADER,
    LIFECYCLE,
    REGISTRY,
    TENANTS,
    TOKENS,
    model_topics,
    requests_topic,
    tenant_topic,
    work_topic,
)

ROOT = Path(__file__).parents[2]
SECRET = "a secret for tests, long enough for it"
WAIT_S = 40.0
EARLY_MS, LATE_MS = 5, 1_000
"""Who waits hears this close to its deadline."""
CONTEXT = 200
LAST_CHARS = 2_000
SLOTS = 1_000
"""So many that a tenant's burst waits for no turn, though no worker takes it."""
E = TypeVar("E")


def now_ms() -> int:
    return int(time.time() * 1000)


def new_id() -> str:
    return request_id(now_ms(), secrets.token_bytes(10))


@dataclass
class Site:
    """One tenant and one model of the byte tokenizer, with topics of their own."""

    kafka: KafkaSettings
    producer: EventProducer
    tenant: str = field(default_factory=lambda: f"t{secrets.token_hex(4)}")
    key_id: str = "k1"
    model: str = field(default_factory=lambda: f"m{secrets.token_hex(4)}")
    tier: str = "interactive"
    version: Mapping[str, Any] = field(default_factory=lambda: {"slots": SLOTS})
    seen: dict[str, list[tuple[ConsumerRecord, Event | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._decoder = EventDecoder(self.kafka)

    @property
    def work(self) -> str:
        return work_topic(self.model, "v1", self.tier)

    def registered(self, **more: Any) -> ModelVersionRegistered:
        """The model's only version; `more` holds instead of what `version` says."""
        said = {**self.version, **more}
        return ModelVersionRegistered(
            self.model, "v1", "scripted", "", CONTEXT, tokenizer="bytes", partitions=2, **said
        )

    async def start(self) -> None:
        specs = model_topics(self.model, "v1", (self.tier,), 2, 60_000)
        await ensure(self.kafka, [*specs, tenant_topic(self.tenant)])
        key = ApiKey(self.key_id, "0" * 64, (self.tier,), now_ms())
        for topic, event, name in (
            (TENANTS, TenantChanged(self.tenant, "salt", (key,), now_ms()), self.tenant),
            (REGISTRY, self.registered(), self.model),
            (REGISTRY, ModelPromoted(self.model, "v1"), self.model),
        ):
            await self.producer.send_and_wait(topic, event, key=name)
        topics = [self.work, LIFECYCLE, TOKENS, ANSWERS, CONTROL, DEAD_LETTERS, f"tokens.{self.tenant}"]
        await self._follow(topics)

    # --- writing -----------------------------------------------------------------------------------------------------

    def grant(
        self,
        reply: Reply | None = None,
        *,
        secret: str = SECRET,
        tiers: tuple[str, ...] | None = None,
        valid_ms: int = 600_000,
    ) -> str:
        place, until_ms = reply or Reply(TOKENS, 3), now_ms() + valid_ms
        return mint(secret.encode(), Grant(self.tenant, self.key_id, tiers or (self.tier,), place, until_ms))

    async def send(
        self,
        event: Event | bytes | None,
        *,
        grant: str | None = "",
        key: str | None = "",
        partition: int | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
        encoding: str = "avro",
    ) -> ConsumerRecord:
        """Put a record on the requests of its tier, by default with a good grant and the tenant's key."""
        token = self.grant() if grant == "" else grant
        found = [*headers, *([(GRANT_HEADER, token.encode())] if token else [])]
        name = self.tenant if key == "" else key
        topic = requests_topic(self.tier)
        if isinstance(event, bytes | None):
            return await (
                await self.producer.send_raw(topic, event, None if name is None else name.encode(), partition, found)
            )
        return await self.producer.send_and_wait(
            topic, event, key=name, partition=partition, headers=found, encoding=encoding
        )

    async def ask(self, prompt: str = "hello", rid: str | None = None, **how: Any) -> str:
        sent = how.pop("send", {})
        request = InferenceRequested(rid or new_id(), how.pop("model", self.model), prompt=prompt, **how)
        await self.send(request, **sent)
        return request.request_id

    async def tokens(self, *events: Event, topic: str = TOKENS, partition: int = 3) -> None:
        """Put a worker's, timer's or cancel's events on a `tokens` partition."""
        for event in events:
            await self.producer.send_and_wait(topic, event, partition=partition)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _follow(self, topics: list[str]) -> None:
        """Read these topics from their present ends."""
        self._consumer = make_consumer(self.kafka)
        await self._consumer.start()
        found = {topic: await partitions_of(self._consumer, topic) for topic in topics}
        self._consumer.assign([TopicPartition(topic, number) for topic in topics for number in found[topic]])
        await self._consumer.seek_to_end()
        for partition in self._consumer.assignment():
            await self._consumer.position(partition)

    async def stop(self) -> None:
        await self._consumer.stop()

    async def _pull(self, timeout_ms: int) -> None:
        for records in (await self._consumer.getmany(timeout_ms=timeout_ms)).values():
            for record in records:
                kept = self.seen.setdefault(record.topic, [])
                try:
                    kept.append((record, await self._decoder.decode(record.value)))
                except Undecodable:
                    kept.append((record, None))

    async def all(self, topic: str, kind: type[E], matches: Callable[[E], bool] = lambda _: True) -> list[E]:
        """The events of one kind that the topic got since the site's start, up to now."""
        ends = await self._consumer.end_offsets(self._consumer.assignment())
        while any([await self._consumer.position(partition) < end for partition, end in ends.items()]):
            await self._pull(200)
        return self._matching(topic, kind, matches)

    def _matching(self, topic: str, kind: type[E], matches: Callable[[E], bool]) -> list[E]:
        return [event for _, event in self.seen.get(topic, ()) if isinstance(event, kind) and matches(event)]

    async def one(self, topic: str, kind: type[E], matches: Callable[[E], bool]) -> E:
        """Wait for an event."""
        async with asyncio.timeout(WAIT_S):
            while not (found := self._matching(topic, kind, matches)):
                await self._pull(500)
        return found[0]

    async def of(self, topic: str, kind: type[E], rid: str) -> E:
        """Wait for a request's event."""
        return await self.one(topic, kind, lambda event: getattr(event, "request_id", None) == rid)

    async def buried(self, sent: Any) -> RecordDeadLettered:
        """Wait for the dead letter of the record at this place."""
        place = (sent.topic, sent.partition, sent.offset)
        return await self.one(
            DEAD_LETTERS, RecordDeadLettered, lambda letter: (letter.topic, letter.partition, letter.offset) == place
        )

    def record_of(self, topic: str, event: object) -> ConsumerRecord:
        return next(record for record, found in self.seen[topic] if found is event)

    def heard_in_time(self, refusal: InferenceRejected, timeout_ms: int) -> None:
        """The broker took the refusal soon after the deadline of its request, and not before it."""
        told_ms = self.record_of(TOKENS, refusal).timestamp
        assert refusal.reason == "deadline_exceeded", refusal
        late_ms = told_ms - refusal.requested_ms - timeout_ms
        assert -EARLY_MS <= late_ms < LATE_MS, late_ms


@contextlib.asynccontextmanager
async def open_site(kafka: KafkaSettings, tier: str = "interactive", **version: Any) -> AsyncIterator[Site]:
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        site = Site(kafka, producer, tier=tier, version={"slots": SLOTS, **version})
        try:
            await site.start()
            yield site
        finally:
            await site.stop()
    finally:
        await producer.stop()


class Agent:
    """An agent's process."""

    def __init__(self, name: str, kafka: KafkaSettings, folder: Path, **env: str) -> None:
        self.name = name
        self._folder = folder
        self._env = {
            **os.environ,
            **kafka.to_env(),
            "HEADRACE_DATA": str(folder),
            "HEADRACE_GRANT_SECRET": SECRET,
            "PYTHONPATH": str(ROOT),
            **env,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        self._port = free_port()
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/streams/agent_process.py"), self.name],
                env={**self._env, "HEADRACE_OPS_PORT": str(self._port)}, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self._until_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def _until_ready(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + WAIT_S
        while not _ready(self._port):
            assert process.poll() is None, self.last_words()
            assert time.monotonic() < limit, self.last_words()
            time.sleep(0.05)

    @property
    def objects(self) -> Path:
        """The folder that is its object store."""
        return self._folder / DEFAULT_FOLDER

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-LAST_CHARS:]

    def metrics(self) -> str:
        """What it counts, as Prometheus reads it."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Stop it in an orderly way; its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
