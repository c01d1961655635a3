"""Events onto the log and off it again.

`EventProducer` owns one idempotent Kafka producer and replaces it when a failed batch has broken its sequence.
`EventDecoder` (`infra/decoder.py`) reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from aiokafka.structs import RecordMetadata

from infra.decoder import EventDecoder
from infra.kafka import Producer, make_producer, unreachable
from infra.payloads import Payloads
from infra.reach import silence
from infra.read import read_to_end
from infra.settings import KafkaSettings
from infra.together import together
from infra.undelivered import NoSuchPartition, NotDelivered, RecordTooLarge
from schemas.codec import Codec, encode, encode_json, published
from schemas.errors import HeadraceError, Undecodable
from schemas.events import EVENT_TYPES, Event, SchemaPublished
from schemas.payloads import Stored, too_many_ids
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES, SCHEMAS

__all__ = ["EventDecoder", "EventProducer", "Headers", "NoSuchPartition", "NotDelivered", "RecordTooLarge"]

Headers = Sequence[tuple[str, bytes]]

REQUEST_TIMEOUT_MS = 15_000
TOPIC_WAIT_S = 5.0
LOOKS_MAX = 2  # an update that is under way already may have been asked without the topic
FLUSH_WAIT_S = 10.0
ABANDON_WAIT_S = 1.0
REBUILD_TRIES_MAX = 8
WATCH_S = 3.0
"""How often it is asked whether the log can be reached."""
REBUILD_BACKOFF_S = 0.1
REBUILD_BACKOFF_MAX_S = 5.0
SEND_WAIT_S = 15.0  # a send during a rebuild waits this long for its end
FULL_BYTES = 256 * 1024
"""So much of a partition goes at once. Who comes while a batch is full waits until it is on its way, which costs more than to be written."""


class EventProducer:
    """Writes events. For one event loop; safe for any number of its tasks.

    Records of one partition arrive in the order in which `send` was called, each once, unless a future fails: then
    that record's fate is unknown, and so is that of all that were on their way (their futures fail too). What goes to the
    object store first is in its place if its `send` was awaited before the next.
    """

    def __init__(
        self, settings: KafkaSettings, process: str, payloads: Payloads | None = None, *, gather: bool = False
    ) -> None:
        """`payloads` takes what is too large for a record; without it such an event is refused. `gather`: see `infra.gathering`."""
        self._settings = settings
        self._payloads = payloads
        self._gather = gather
        self._log = structlog.get_logger(process)
        self._producer: Producer | None = None
        self._topics: set[str] = set()
        self._meeting: Counter[str] = Counter()
        self._outstanding: set[asyncio.Future[RecordMetadata]] = set()
        self._ready = asyncio.Event()
        self._rebuilding: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._silence: str | None = None
        self._closed = True

    @property
    def failure(self) -> str | None:
        """Why nothing can be sent at present, or None: for a readiness check."""
        if self._closed:
            return "the producer is closed"
        if not self._ready.is_set():
            return self._silence or "the producer is being replaced after a failed delivery"
        return self._silence

    @property
    def outstanding(self) -> int:
        """Records sent and not yet confirmed."""
        return len(self._outstanding)

    async def start(self) -> None:
        """Connect, and make the schemas that it writes known. Raises HeadraceError (unavailable) if it can't."""
        try:
            self._producer = await self._connect()
        except (KafkaError, OSError) as error:
            raise NotDelivered(await unreachable(self._settings, error)) from error
        self._closed = False
        self._ready.set()
        self._watching = asyncio.create_task(self._watch(), name="watch over the log")
        try:
            await self._publish_schemas()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Send what is buffered, for at most `FLUSH_WAIT_S`, and close. What is left then fails with `NotDelivered`.

        A log that can't be reached isn't waited for.
        """
        self._closed = True
        for task in (self._watching, self._rebuilding):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._watching = self._rebuilding = None
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(TimeoutError, KafkaError):
                await asyncio.wait_for(producer.flush(), FLUSH_WAIT_S if self._silence is None else 0)
            await asyncio.sleep(0)  # lets confirmed records' callbacks run
            await _abandon(producer)
        self._fail_outstanding("the producer was closed")

    async def send(
        self,
        topic: str,
        event: Event,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Headers = (),
        encoding: str = "avro",
        owner: str | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Buffer an event; the future resolves when the broker has confirmed it.

        `encoding` and `owner` are those of `encoded`. Raises, and the future fails, with HeadraceError: `NotDelivered`
        (retriable), `RecordTooLarge`, `NoSuchPartition`; and what `encoded` raises. A future that nobody awaits is
        logged if it fails, and otherwise harmless.
        """
        value = await self.encoded(event, encoding, owner)
        return await self.send_raw(topic, value, None if key is None else key.encode(), partition, headers)

    async def encoded(self, event: Event, encoding: str = "avro", owner: str | None = None) -> bytes:
        """An event as a record's value, in `avro` or `json`. One that is too large goes to the object store first, and the value refers to it.

        `owner` is its tenant, where the event itself doesn't say so. Raises HeadraceError: invalid_request for an event that can't be
        encoded; `infra.objects.StoreAway`; `RecordTooLarge` for one that the object store doesn't take either.
        """
        form = encode if encoding == "avro" else encode_json
        tenant = owner or getattr(event, "tenant", None)
        if self._payloads is None or not tenant or not isinstance(event, Stored):
            return form(event)
        value = None if too_many_ids(event) else form(event)
        if value is not None and len(value) <= INLINE_MAX_BYTES:
            return value
        return form(await self._payloads.put(event, value, tenant, encoding))

    async def send_and_wait(
        self,
        topic: str,
        event: Event,
        *,
        key: str | None = None,
        partition: int | None = None,
        headers: Headers = (),
        encoding: str = "avro",
        owner: str | None = None,
    ) -> RecordMetadata:
        """`send`, and wait for the broker's word."""
        future = await self.send(
            topic, event, key=key, partition=partition, headers=headers, encoding=encoding, owner=owner
        )
        return await future

    async def send_raw(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[RecordMetadata]:
        """`send` for bytes. No value is a tombstone, which needs a key."""
        if value is None and key is None:
            raise HeadraceError(Reason.INVALID_REQUEST, "a record needs a value or a key")
        producer = self._producer
        if producer is None or not self._ready.is_set():
            producer = await self._usable()
        if topic not in self._topics:
            await self._meet(producer, topic)
        try:
            if partition is not None and partition in (producer.client.cluster.partitions_for_topic(topic) or ()):
                inner = await producer.put(TopicPartition(topic, partition), value, key, list(headers))
            else:
                inner = await self._buffer(producer, topic, value, key, partition, headers)
        except NoSuchPartition:
            raise
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(f"a record for {topic} is too large: {error}") from error
        except (KafkaError, OSError) as error:
            raise NotDelivered(f"a record for {topic} can't be sent: {error}") from error
        return self._tracked(inner, producer)

    async def send_together(
        self,
        topic: str,
        events: Sequence[Event],
        *,
        key: str,
        partition: int,
        headers: Headers = (),
        encoding: str = "avro",
    ) -> asyncio.Future[RecordMetadata]:
        """`send` for several records of one partition that stand in the log all together, in this order, or not at all: they are one batch.

        The future tells the first one's place. Raises `RecordTooLarge` if they are more than a batch takes.
        """
        if (batch := together(events, key, headers, encoding)) is None:
            raise RecordTooLarge(f"{len(events)} records for {topic} are too large to be written together")
        await self.require(topic, partition)
        producer = await self._usable()
        try:
            inner = await producer.send_batch(batch, topic, partition=partition)
        except (KafkaError, OSError) as error:
            raise NotDelivered(f"records for {topic} can't be sent: {error}") from error
        return self._tracked(inner, producer)

    def _tracked(self, inner: asyncio.Future[Any], producer: Producer) -> asyncio.Future[RecordMetadata]:
        """The future that a caller gets for aiokafka's own: it fails, too, when the producer is replaced or closed."""
        outer: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        self._outstanding.add(outer)
        inner.add_done_callback(partial(self._settle, outer, producer))
        return outer

    async def require(self, topic: str, partition: int) -> None:
        """Raises HeadraceError: `NoSuchPartition` if nothing can be written there, `NotDelivered` if that can't be told now."""
        producer = await self._usable()
        if topic not in self._topics:
            await self._meet(producer, topic)
        for _ in range(LOOKS_MAX):
            if partition in (producer.client.cluster.partitions_for_topic(topic) or ()):
                return
            producer.client.add_topic(topic)
            await producer.client.force_metadata_update()  # the topic may have grown
        if partition not in (producer.client.cluster.partitions_for_topic(topic) or ()):
            raise NoSuchPartition(f"the topic {topic} has no partition {partition}")

    async def _usable(self) -> Producer:
        if not self._ready.is_set() and not self._closed:
            self._begin_rebuilding()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), SEND_WAIT_S)
        if self._producer is None or not self._ready.is_set():
            raise NotDelivered(self.failure or "the producer is closed")
        return self._producer

    async def _meet(self, producer: Producer, topic: str) -> None:
        """Wait a little for a topic's metadata. A missing one is forgotten again, or aiokafka would keep asking.

        It is missing only if the broker says so: one that is silent for so long may have it.
        """
        self._meeting[topic] += 1
        try:
            await asyncio.wait_for(producer.partitions_for(topic), TOPIC_WAIT_S)
        except (TimeoutError, KafkaError) as error:
            silent = await silence(producer.client, self._settings)
            if producer.client.cluster.partitions_for_topic(topic) is None:
                producer.client.set_topics(self._topics.union(self._meeting - Counter([topic])))
                if silent is None and isinstance(error, TimeoutError):
                    raise NoSuchPartition(f"the topic {topic} doesn't exist") from None
                raise NotDelivered(f"a record for {topic} can't be sent: {silent or error}") from error
        finally:
            self._meeting -= Counter([topic])  # which keeps no zeros
        if producer is self._producer:  # else another has taken its place, and knows nothing yet
            self._topics.add(topic)

    async def _buffer(
        self,
        producer: Producer,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: Headers,
    ) -> asyncio.Future[RecordMetadata]:
        inner: asyncio.Future[RecordMetadata]
        try:
            inner = await producer.send(topic, value, key, partition, headers=list(headers))
        except AssertionError:  # aiokafka's way to say that it doesn't know the partition
            await producer.client.force_metadata_update()  # the topic may have grown
            if partition not in (producer.client.cluster.partitions_for_topic(topic) or ()):
                raise NoSuchPartition(f"the topic {topic} has no partition {partition}") from None
            inner = await producer.send(topic, value, key, partition, headers=list(headers))
        return inner

    def _settle(
        self,
        outer: asyncio.Future[RecordMetadata],
        producer: Producer,
        inner: asyncio.Future[RecordMetadata],
    ) -> None:
        self._outstanding.discard(outer)
        if inner.cancelled():
            error: BaseException | None = asyncio.CancelledError()
        else:
            error = inner.exception()
        if error is None:
            if not outer.done():
                outer.set_result(inner.result())
            return
        message = f"the broker did not take a record: {error!r}"
        too_large = isinstance(error, MessageSizeTooLargeError)  # by a limit of its own: it won't take it later either
        self._fail(outer, RecordTooLarge(message) if too_large else NotDelivered(message))
        if producer is self._producer and not self._closed:
            # Its sequence number was used up, so the broker would refuse all that follows.
            self._log.warning("producer is replaced", error=repr(error), outstanding=len(self._outstanding))
            self._ready.clear()
            self._fail_outstanding("the producer was replaced after another record failed")
            self._begin_rebuilding()

    def _fail(self, outer: asyncio.Future[RecordMetadata], error: HeadraceError) -> None:
        if not outer.done():
            outer.set_exception(error)
            outer.exception()  # marks it as seen, for callers that don't await it

    def _fail_outstanding(self, message: str) -> None:
        failed, self._outstanding = self._outstanding, set()
        for outer in failed:
            self._fail(outer, NotDelivered(message))

    async def _connect(self) -> Producer:
        producer = make_producer(self._settings, request_timeout_ms=REQUEST_TIMEOUT_MS, max_batch_size=FULL_BYTES)
        if self._gather:
            producer.gather()
        try:
            await producer.start()
        except BaseException:
            await _abandon(producer)
            raise
        return producer

    async def _watch(self) -> None:
        """Know whether the log can be reached, also when nothing is sent; a replacement that was given up begins again."""
        while True:
            await asyncio.sleep(WATCH_S)
            if (producer := self._producer) is not None:
                self._silence = await silence(producer.client, self._settings)
            elif not self._ready.is_set():
                self._begin_rebuilding()

    def _begin_rebuilding(self) -> None:
        if self._rebuilding is None or self._rebuilding.done():  # else the last round of tries goes on
            self._rebuilding = asyncio.create_task(self._rebuild())

    async def _rebuild(self) -> None:
        old, self._producer = self._producer, None
        if old is not None:
            await _abandon(old)
        backoff_s = REBUILD_BACKOFF_S
        for _ in range(REBUILD_TRIES_MAX):
            try:
                self._topics.clear()
                self._producer = await self._connect()
                self._silence = None
                self._ready.set()
                return
            except (KafkaError, OSError) as error:
                self._log.warning("producer can't be replaced yet", error=repr(error))
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, REBUILD_BACKOFF_MAX_S)

    async def _publish_schemas(self) -> None:
        codec, there = Codec(), set()
        async for record in read_to_end(self._settings, SCHEMAS):
            with contextlib.suppress(Undecodable):
                event = codec.decode(record.value)
                if isinstance(event, SchemaPublished):
                    there.add(event.fingerprint)
        missing = [item for cls in EVENT_TYPES if (item := published(cls)).fingerprint not in there]
        await asyncio.gather(*[await self.send(SCHEMAS, item, key=item.fingerprint) for item in missing])


async def _abandon(producer: Producer) -> None:
    """Close a producer at once, whatever it still holds. Its own `stop` waits without limit for what it can't send."""
    inside: Any = producer
    inside._closed = True  # noqa: SLF001  # else it warns that it was not closed
    await producer.client.close()
    with contextlib.suppress(TimeoutError, KafkaError):
        await asyncio.wait_for(inside._sender.close(), ABANDON_WAIT_S)  # noqa: SLF001
