"""Faust as admission uses it: one topic of raw records, taken without automatic acks, and acked in order by `streams.acks`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import faust
from aiokafka import ConsumerRecord
from faust.auth import SASLCredentials, SSLCredentials
from faust.types import TP

from infra.kafka import METADATA_AGE_MS, tls_context
from infra.settings import AdmissionSettings, KafkaSettings
from schemas.errors import HeadraceError
from schemas.quick import quick
from schemas.reasons import Reason
from schemas.topics import INTERACTIVE
from streams import faust_transport
from streams.acks import InOrderAcks, Partition, Taken
from streams.faust_transport import Message, Unreadable
from streams.lease import Lease

START_S_MAX = 60.0
STOP_S_MAX = 10.0
FINISH_S_MAX = 5.0
WATCH_S = 0.5
COMMIT_INTERVAL_S = 0.5
BUFFERED_RECORDS_MAX = 1_024
POLLED_RECORDS_MAX = 500
TOGETHER_MAX = 16
AHEAD_MAX, AHEAD_PARKED_MAX = 10_000, 50_000
"""Records of a partition that are read beyond the oldest that isn't done: after a crash they come again, and what became of them is remembered.
What is parked isn't counted; where it is, others pass it by, and may be more.
"""
REQUEST_TIMEOUT_S = 40.0

FAR_AHEAD = "far ahead"


@quick
@dataclass(frozen=True, slots=True)
class Record:
    """One record as the broker gave it; the same names as aiokafka's `ConsumerRecord`."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class LeftUndone(Exception):  # no error: the record stays where it is
    """Raised by `handle`: this record isn't decided here and not acked; whoever has its partition next gets it again."""


class Parked(Exception):  # no error: the record is handled later
    """Raised by `handle`: this record is decided later, when it is given `again`. Until then nothing of it is kept but what `keep` is given,
    which says that it is done.
    """

    def __init__(self, keep: Callable[[Taken], None]) -> None:
        super().__init__()
        self.keep = keep


Handle = Callable[[Record], Awaitable[None]]


class Watcher(Protocol):
    """Hears which partitions come and go, before any of their records."""

    def assigned(self, partitions: Collection[int]) -> None:
        """These are ours now, and no others."""

    def revoked(self, partitions: Iterable[int]) -> None:
        """These go to others once what is being decided in them is done, or has had its time; nothing more is to be decided."""


class FaustShell:
    """Runs a Faust app that hands each record of one topic to `handle`, and acks it once that returns.

    `lease` is renewed as the group confirms this member; `watchers` hear of its partitions. At most `open_max` records are handled at once. An exception of `handle` is fatal, since acking would lose the record:
    `failed` resolves with it.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        topic: str,
        group: str,
        handle: Handle,
        open_max: int,
        lease: Lease | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._lease = lease
        self._watchers = watchers
        self._settings = settings
        self._topic = topic
        self._group = group
        self._handle = handle
        self._slots = asyncio.Semaphore(open_max)
        self._ahead_max = AHEAD_MAX if settings.tier == INTERACTIVE else AHEAD_PARKED_MAX
        self._acks = InOrderAcks()
        self._tasks: dict[asyncio.Task[None], Partition] = {}
        self._pauses: dict[int, set[str]] = {}
        self._app: Any = None
        self._stopping = False
        self._watching: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._assigned: set[Partition] | None = None
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()

    def committed(self, partition: int) -> int:
        """The offset of the partition's requests to be read next after a crash, as far as is known: 0 at first."""
        consumer = self._app.consumer if self._app is not None else None
        known = consumer._committed_offset.get(TP(self._topic, partition)) if consumer is not None else None  # noqa: SLF001  # Faust tells it nowhere else
        return known or 0

    @property
    def _folder(self) -> Path:
        return self._settings.data_dir / "faust"

    @property
    def not_ready(self) -> str | None:
        """Why no records can come yet; None if they can. No partition at all is fine: other members have them."""
        if self._assigned is None:
            return f"no partitions of {self._topic} are assigned yet"
        return None

    @contextlib.asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Within `handle`: while in it, its record is none of the `open_max` that are handled at once."""
        self._slots.release()
        try:
            yield
        finally:
            await asyncio.shield(self._slots.acquire())

    def pause(self, partition: int, why: str) -> None:
        """Read no more of a partition, until `resume` or the next assignment; what was read already still comes."""
        self._pauses.setdefault(partition, set()).add(why)
        self._app.consumer.pause_partitions({TP(self._topic, partition)})

    def resume(self, partition: int, why: str) -> None:
        """Read on, if there is no other reason not to."""
        reasons = self._pauses.get(partition, set())
        if why in reasons:
            reasons.discard(why)
            if not reasons:
                self._app.consumer.resume_partitions({TP(self._topic, partition)})

    async def start(self) -> None:
        """Start the app; partitions are assigned soon after. Raises HeadraceError (unavailable) if it can't start in time."""
        self._app = self._make_app()
        self._folder.mkdir(parents=True, exist_ok=True)  # Faust insists on one, and puts nothing there
        try:
            await asyncio.wait_for(self._app.start(), START_S_MAX)
        except TimeoutError:
            raise HeadraceError(
                Reason.UNAVAILABLE, f"Kafka doesn't answer at {self._settings.kafka.bootstrap}"
            ) from None
        self._watching = asyncio.ensure_future(self._watch())
        self._taking = asyncio.ensure_future(self._take(self._app.transport.queue))
        self._taking.add_done_callback(self._no_more)

    async def _watch(self) -> None:
        """Faust stops by itself when one of its parts crashes, and would say so to nobody."""
        while not self._app.should_stop:  # noqa: ASYNC110  # the app's own events can't be awaited from outside
            await asyncio.sleep(WATCH_S)
        if not self._stopping and not self.failed.done():
            reason = self._app.crash_reason
            self.failed.set_exception(HeadraceError(Reason.UNAVAILABLE, f"Faust stopped: {reason!r}"))

    async def stop(self) -> None:
        """Stop taking records, finish those that are open, and commit them."""
        if self._app is None:
            return
        self._stopping = True
        for task in (self._watching, self._taking):
            if task is not None:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_S_MAX)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._app.stop(), STOP_S_MAX)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _make_app(self) -> Any:
        for name in ("faust", "mode", "aiokafka", faust_transport.__name__):
            logging.getLogger(name).setLevel(logging.WARNING)
        kafka = self._settings.kafka
        app = faust.App(
            self._group,
            broker=[f"kafka://{server}" for server in kafka.bootstrap.split(",")],
            broker_credentials=_credentials(kafka),
            broker_commit_interval=COMMIT_INTERVAL_S,
            broker_session_timeout=self._settings.session_timeout_ms / 1000,
            broker_heartbeat_interval=self._settings.session_timeout_ms / 5000,
            broker_request_timeout=REQUEST_TIMEOUT_S,
            broker_max_poll_records=POLLED_RECORDS_MAX,
            consumer_auto_offset_reset="earliest",
            consumer_metadata_max_age_ms=METADATA_AGE_MS,
            stream_buffer_maxsize=BUFFERED_RECORDS_MAX,
            stream_wait_empty=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            datadir=str(self._folder),
        )
        app.finalize()
        app.transport = faust_transport.OneLoopTransport(app.conf.broker_consumer, app)
        app.transport.queue = aiter(app.topic(self._topic)).queue  # iterating over a topic is what subscribes to it
        app.on_partitions_revoked.connect(self._on_revoked, weak=False)
        app.on_partitions_assigned.connect(self._on_assigned, weak=False)
        return app

    async def _take(self, queue: asyncio.Queue[Message]) -> None:
        """Take messages as they come. Those that came together start together, so that what they write travels together."""
        while True:
            came = [await queue.get()]
            while len(came) < TOGETHER_MAX and not queue.empty():
                came.append(queue.get_nowait())
            # At once: whatever waits for a slot when its partition is taken away must not be acked either.
            for record, done in [(message.record, self._note(message)) for message in came if self._is_ours(message)]:
                if isinstance(record, Unreadable):
                    done()
                else:
                    await self._begin(record, done)
            await asyncio.sleep(0)  # what began gets on meanwhile

    def _no_more(self, taking: asyncio.Task[None]) -> None:
        if not taking.cancelled() and (error := taking.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    def _is_ours(self, message: Message) -> bool:
        """Whether it was read since the last rebalance: else it comes again, here or elsewhere."""
        return bool(self._app.flow_control.is_active() and message.generation_id == self._app.consumer_generation_id)

    def _note(self, message: Message) -> Taken:
        self._app.monitor.stream_inbound_time[message.tp] = time.monotonic()  # by which Faust tells what hangs
        done = self._acks.take(message.tp, partial(self._app.consumer.ack, message))
        message.record = None  # whoever handles it has it, for as long as it is needed
        if self._acks.ahead(message.tp) >= self._ahead_max:
            self.pause(message.tp.partition, FAR_AHEAD)
        return done

    async def _begin(self, found: ConsumerRecord, done: Taken) -> asyncio.Task[None]:
        headers = tuple(dict(found.headers).items())
        record = Record(found.topic, found.partition, found.offset, found.timestamp, found.key, found.value, headers)
        await self._slots.acquire()
        task = self._loop.create_task(self._run(record, done))
        self._tasks[task] = record.topic, record.partition
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def again(self, record: ConsumerRecord, done: Taken) -> asyncio.Task[None]:
        """Handle a record that was parked; what was kept of it says so when it is done. If its partition is gone, nothing is to be done."""
        done.park(False)
        return await self._begin(record, done)

    async def _run(self, record: Record, done: Taken) -> None:
        try:
            if done.gone:
                return
            await self._handle(record)
            done()
        except Parked as parked:
            done.park(True)
            parked.keep(done)
        except (asyncio.CancelledError, LeftUndone):
            return
        except BaseException as error:
            if not self.failed.done():
                self.failed.set_exception(error)
        finally:
            self._slots.release()
            if self._pauses and self._acks.ahead((record.topic, record.partition)) < self._ahead_max // 2:
                self.resume(record.partition, FAR_AHEAD)

    async def _on_revoked(self, _app: object, revoked: Iterable[Any], **_: object) -> None:
        gone = {(tp.topic, tp.partition) for tp in revoked}
        self._acks.drop(gone)  # what is not decided any more must not be acked
        if self._assigned is not None:  # Faust also says so before the first assignment
            self._assigned -= gone
        for watcher in self._watchers:
            watcher.revoked([partition for topic, partition in gone if topic == self._topic])
        # Whoever gets them next must find in the log what was decided here.
        if open_tasks := [task for task, partition in self._tasks.items() if partition in gone]:
            # What is let in while the lease holds counts even if the log has it after another has decided.
            left_s = self._lease.left_s if self._lease is not None else 0.0
            await asyncio.wait(open_tasks, timeout=max(FINISH_S_MAX, left_s))

    async def _on_assigned(self, _app: object, assigned: Iterable[Any], **_: object) -> None:
        self._assigned = {(tp.topic, tp.partition) for tp in assigned if tp.topic == self._topic}
        for partition in [number for number, reasons in self._pauses.items() if reasons]:
            self._app.consumer.resume_partitions({TP(self._topic, partition)} & set(assigned))
        self._pauses.clear()
        if self._lease is not None:
            self._lease.watch(self._app.consumer._thread._consumer._coordinator)  # noqa: SLF001  # Faust keeps it to itself
            self._lease.proved()
        for watcher in self._watchers:
            watcher.assigned([partition for _, partition in self._assigned])


def _credentials(kafka: KafkaSettings) -> Any:
    """Faust's form of how to sign in; None for plain text."""
    context = tls_context(kafka)
    if kafka.security_protocol.startswith("SASL"):
        return SASLCredentials(
            username=kafka.sasl_username,
            password=kafka.sasl_password,
            ssl_context=context,
            mechanism=kafka.sasl_mechanism,
        )
    return SSLCredentials(context=context) if context is not None else None
