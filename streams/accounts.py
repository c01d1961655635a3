"""The ledgers act: for each partition of requests that admission has, `lifecycle` is folded by `decisions.accounts`, and saved in rows.

One aiokafka consumer without a group follows the same partitions of `lifecycle` as Faust gives of the requests. A partition that comes is
restored from its rows in `ledger.<tier>` and read on to where `lifecycle` ended then; nothing is decided of it before. One that went and comes
back was followed all the while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from decisions.accounts import Accounts
from decisions.ledger_rows import Open, Row
from decisions.verdicts import CANCEL
from infra.kafka import Batching, make_consumer, stop_consumer
from infra.log import EventDecoder, EventProducer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.codec import Growing
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event, LedgerSaved, RequestKeyed
from schemas.topics import LIFECYCLE, idempotency_topic, ledger_topic
from streams.keys import read_keys
from streams.lease import Lease

SAVE_S = 5.0
REST = 4.0
"""For each second of the processor that making a row takes, so many without one: a fifth of a core for saving while requests are decided."""
OPEN_AT_ONCE = 32
"""So many of a row's open requests are written before whoever decides has a turn."""
LAST_S_MAX = 3.0
"""So long the last saving may keep a process from leaving: whoever comes next can read all of it in `lifecycle`, too."""
POLL_MS = 100
RECORDS_MAX = 2_000
FETCH_WAIT_MS = 100
"""By so much the end of a request may be heard of late; a fetch for each record would cost more than all else that is done for it."""
FETCH_BYTES_MIN = 64 * 1024
WROTE_MAX = 4_096
"""Of so many events that this process wrote it is remembered what their bytes mean."""
RETRY_S = 1.0
LEASE_LOOK_S = 0.1

T = TypeVar("T")
_CANCEL = CANCEL.encode()

log = structlog.get_logger("streams.accounts")


@dataclass(slots=True)
class _Held:
    """A partition's ledgers. `ours` while Faust gives it; `ready` once it was read to `target`; `news` when more is read.

    `stale` are the keys of older rows, by tenant. `keys` reads under which idempotency keys requests were let in before.
    """

    accounts: Accounts
    restored: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    target: int | None = None
    ours: bool = True
    news: asyncio.Event = field(default_factory=asyncio.Event)
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    stale: dict[str, set[str]] = field(default_factory=dict)
    keys: asyncio.Task[None] | None = None

    def forget_keys(self) -> None:
        """Nobody asks for them any more."""
        if self.keys is not None:
            self.keys.cancel()


class Ledgers:
    """The ledgers of one tier, in the partitions that this process has."""

    def __init__(self, settings: KafkaSettings, tier: str, producer: EventProducer, decoder: EventDecoder) -> None:
        self._settings = settings
        self._tier = tier
        self._names_tier = tier.encode()
        self._topic = ledger_topic(tier)
        self._producer = producer
        self._decoder = decoder
        self._committed: Callable[[int], int] = lambda _: 0
        self._lease: Lease | None = None
        self._batching = Batching(FETCH_WAIT_MS, FETCH_BYTES_MIN)
        self._held: dict[int, _Held] = {}
        self._wrote: OrderedDict[bytes | None, Event] = OrderedDict()
        self._changed = False
        self._consumer: AIOKafkaConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: str | None = None

    def start(self, committed: Callable[[int], int], lease: Lease) -> None:
        """Follow and save from now on. `committed` tells how far a partition's requests are committed; `lease` when partitions are ours."""
        self._committed, self._lease = committed, lease
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._save_regularly())]

    async def save_last(self) -> None:
        """Save once more, and no more then. To be done before the partitions are given up: they are others' to save from then on."""
        await self._end(self._tasks[1:])
        with contextlib.suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(LAST_S_MAX):
                await self._save_all(last=True)

    async def stop(self) -> None:
        """Follow and save no more."""
        await self._end([*self._tasks, *(held.keys for held in self._held.values() if held.keys is not None)])
        await self._close()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- partitions come and go ----------------------------------------------------------------------------------------

    def revoked(self, partitions: Iterable[int]) -> None:
        """These are others' now: nothing is decided of them until they come again. Who waits for them goes away."""
        for partition in partitions:
            if (held := self._held.get(partition)) is not None:
                held.ours = False
                held.ready.set()

    def assigned(self, partitions: Collection[int]) -> None:
        """These are ours, and no others. Each is ready once it is read to where `lifecycle` ends now."""
        for partition in set(self._held) - set(partitions):
            gone = self._held.pop(partition)
            gone.ours = False
            gone.forget_keys()
            gone.ready.set()
        for partition in partitions:
            held = self._held.setdefault(partition, _Held(Accounts(self._tier)))
            held.ours, held.target, held.ready = True, None, asyncio.Event()
        self._changed = True

    @property
    def not_ready(self) -> str | None:
        """Why requests of some partition can't be decided yet; None if all can."""
        waiting = sorted(number for number, held in self._held.items() if held.ours and not held.ready.is_set())
        return f"the ledgers of {self._topic} are being read: partitions {waiting}" if waiting else None

    async def of(self, partition: int) -> Accounts | None:
        """A partition's ledgers, once they are ready and the partition surely ours; None if it went meanwhile."""
        held = self._held.get(partition)
        if held is None:
            return None
        await held.ready.wait()
        while held.ours and self._lease is not None and not self._lease.holds:  # noqa: ASYNC110  # a lease tells nobody
            await asyncio.sleep(LEASE_LOOK_S)
        return held.accounts if self._held.get(partition) is held and held.ours else None

    async def remembers(self, partition: int, accounts: Accounts) -> bool:
        """Waits until the partition's idempotency keys are known; whether these are still its ledgers then."""
        held = self._held.get(partition)
        if held is not None and held.keys is not None:
            await asyncio.wait([held.keys])
            if not held.keys.cancelled():
                held.keys.result()
        return self.current(partition, accounts)

    async def news(self, partition: int, wait_s: float) -> None:
        """Returns when `lifecycle` has told something more in a partition, or after so long."""
        if (held := self._held.get(partition)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(held.news.wait(), wait_s)

    def current(self, partition: int, accounts: Accounts) -> bool:
        """Whether these are still the ledgers by which a partition is decided."""
        held = self._held.get(partition)
        return held is not None and held.ours and held.accounts is accounts

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What must never end while admission runs."""
        return self._tasks

    def known(self, partition: int) -> Accounts | None:
        """The same without waiting: what is known of it by now."""
        held = self._held.get(partition)
        return held.accounts if held is not None else None

    def opened(self) -> Iterator[tuple[str, Mapping[str, Open]]]:
        """By tenant, what is open of those whose partitions are surely ours and read."""
        if self._lease is None or self._lease.holds:
            for held in self._held.values():
                if held.ours and held.ready.is_set():
                    yield from held.accounts.all_opened()

    def wrote(self, value: bytes, event: Event) -> None:
        """An event that this process writes to `lifecycle`: it will read these bytes there, and needn't decode them."""
        self._wrote[value] = event
        if len(self._wrote) > WROTE_MAX:
            self._wrote.popitem(last=False)

    def queueing(self, pool: str) -> set[str]:
        """Who has requests in a pool's queue, of all partitions that are ours."""
        return {name for held in self._held.values() if held.ours for name in held.accounts.queues.tenants(pool)}

    def queued(self, pool: str) -> int:
        """How many requests are in a pool's queue, of all partitions that are ours."""
        return sum(held.accounts.queues.total(pool) for held in self._held.values() if held.ours)

    def queueing_at_most(self, pool: str) -> int:
        """No fewer than `queueing` has, and sooner told."""
        found = 0
        for held in self._held.values():
            if held.ours:
                found += len(held.accounts.queues.tenants(pool))
        return found

    # --- following -----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                if self._changed or self._consumer is None:
                    self._changed = False
                    await self._assign()
                await self._poll()
                self.failure = None
            except (KafkaError, HeadraceError, OSError) as error:
                self.failure = f"{LIFECYCLE} can't be followed: {error!r}"
                log.warning("can't be followed", error=repr(error))
                await self._close()
                await asyncio.sleep(RETRY_S)

    async def _assign(self) -> None:
        fresh = {number: held for number, held in self._held.items() if not held.restored}
        if fresh:
            await self._restore(fresh)
        if self._consumer is None:
            self._consumer = make_consumer(self._settings, **self._batching.arguments)
            await self._consumer.start()
        places = {TopicPartition(LIFECYCLE, number): held for number, held in self._held.items()}
        self._consumer.assign(list(places))
        if not places:
            return
        firsts, ends = (
            await self._consumer.beginning_offsets(list(places)),
            await self._consumer.end_offsets(list(places)),
        )
        for place, held in places.items():
            start = held.accounts.next_offset or held.accounts.start
            self._consumer.seek(place, min(max(start, firsts[place]), ends[place]))
            if held.target is None:
                held.target = ends[place]

    async def _restore(self, fresh: dict[int, _Held]) -> None:
        """The rows there are, of whatever writer."""
        for held in fresh.values():
            held.accounts, held.stale, held.writer = Accounts(self._tier), {}, uuid.uuid4().hex
        last: dict[tuple[int, bytes], bytes | None] = {}
        async for record in read_to_end(self._settings, self._topic, only=fresh):
            if record.key is not None:
                last[record.partition, record.key] = record.value
        for (number, key), value in last.items():
            with contextlib.suppress(Undecodable):
                row = await self._decoder.decode(value) if value is not None else None
                if isinstance(row, LedgerSaved):
                    fresh[number].accounts.restore(row)
                    fresh[number].stale.setdefault(row.tenant, set()).add(key.decode(errors="replace"))
        for number, held in fresh.items():
            held.restored = True
            held.forget_keys()  # only now: what the rows take as done is remembered there
            read = read_keys(self._settings, self._decoder, self._tier, number, held.accounts.keys)
            held.keys = asyncio.create_task(read, name=f"keys {self._tier} {number}")

    async def _poll(self) -> None:
        assert self._consumer is not None
        if not self._held:
            await asyncio.sleep(POLL_MS / 1000)
            return
        batches = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=RECORDS_MAX)
        self._batching.heard(self._consumer, bool(batches))
        for place, records in batches.items():
            await self._take(place.partition, records)
        if self._changed:
            return
        for number, held in self._held.items():
            if held.ours and held.target is not None and not held.ready.is_set():
                place = TopicPartition(LIFECYCLE, number)
                if held.target == 0 or await self._consumer.position(place) >= held.target:
                    held.ready.set()

    async def _take(self, partition: int, records: Iterable[ConsumerRecord]) -> None:
        held = self._held.get(partition)
        for record in records:
            event: Event | None = self._wrote.pop(record.value, None)
            if event is None and self._may_count(record.value or b""):
                event = await self._decoder.decode_or_pass_over(record)
            if held is None or self._held.get(partition) is not held:
                return
            if record.offset < held.accounts.next_offset:
                raise RuntimeError(
                    f"{LIFECYCLE} went back from {held.accounts.next_offset} to {record.offset}: what it told would count twice"
                )
            held.accounts.apply(record.offset, record.timestamp, event)
        if held is not None:
            news, held.news = held.news, asyncio.Event()
            news.set()

    def _may_count(self, value: bytes) -> bool:
        """No ledger holds anything of another tier's; of which tier a cancel is may not be said."""
        return self._names_tier in value or _CANCEL in value

    async def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer)

    # --- saving --------------------------------------------------------------------------------------------------------

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            with contextlib.suppress(HeadraceError):
                await self._save_all()

    async def _save_all(self, *, last: bool = False) -> None:
        """The last time without rests, and with every row.

        Rows are taken while the partition is surely ours. Whoever has it next removes older rows when its own are written; a row of one that
        had been given no notice yet could be newer than those, and removed all the same, while its mark stayed and counted on it.
        """
        for number, held in list(self._held.items()):
            # Before its keys are read it isn't known which of them the failures heard of have freed.
            known = held.ready.is_set() and held.keys is not None and held.keys.done()
            if known and held.ours and self._lease is not None and self._lease.holds:
                await self._save(number, held, last=last)

    async def _save(self, partition: int, held: _Held, *, last: bool) -> None:
        """The mark is written once all before it is confirmed, and older rows go once newer ones are. What isn't written is written next time."""
        found = held.accounts.save(self._committed(partition), int(time.time() * 1000), last=last)
        freed = held.accounts.keys.take_unsaved()
        rows, mark = found[:-1], found[-1:]
        try:
            await self._send_freed(freed, partition)
            for group in (rows, mark):
                await self._send_rows(held, group, partition, 0.0 if last else REST)
            await self._forget_older(partition, held, found)
        except BaseException as error:
            held.accounts.unsaved(rows)
            held.accounts.keys.unsaved(freed)
            if not isinstance(error, HeadraceError):
                raise
            log.warning("ledgers are not saved", partition=partition, error=error.message)

    async def _send_freed(self, freed: Iterable[RequestKeyed], partition: int) -> None:
        topic = idempotency_topic(self._tier)
        sent = [await self._producer.send(topic, key, key=key.tenant, partition=partition) for key in freed]
        await asyncio.gather(*sent)

    async def _send_rows(self, held: _Held, rows: Iterable[Row], partition: int, rest: float) -> None:
        sent = []
        for row in rows:
            value = await _value(row, rest)
            sent.append(await self._producer.send_raw(self._topic, value, _key(row, held).encode(), partition))
        await asyncio.gather(*sent)

    async def _forget_older(self, partition: int, held: _Held, rows: list[Row]) -> None:
        for row in rows:
            for key in held.stale.pop(row.tenant, set()) - {_key(row, held)}:
                await self._producer.send_raw(self._topic, None, key.encode(), partition)


async def _value(row: Row, rest: float) -> bytes:
    """A row as it is written, made in portions of a fraction of a millisecond: after each, and at last, a rest of `rest` times what it took.

    A thread would make it no sooner, and keep the interpreter from whoever decides, each time that the event loop lets go of it.
    """
    began_s = time.thread_time()
    growing = Growing(row.without_open())
    for portion in row.portions(OPEN_AT_ONCE):
        growing.add(portion)
        await asyncio.sleep(rest * (time.thread_time() - began_s))
        began_s = time.thread_time()
    value = growing.value()
    await asyncio.sleep(rest * (time.thread_time() - began_s))
    return value


def _key(row: Row, held: _Held) -> str:
    """Each writer has its own row of a tenant, and is another each time it is given the partition: a late one takes the place of no newer one."""
    return f"{row.tenant}/{held.writer}"
