"""An admission that the log took too late is void: it is decided anew, or by another."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka.structs import RecordMetadata, TopicPartition

from decisions.accounts import Accounts
from infra.grants import Grant, mint
from infra.log import EventDecoder, RecordTooLarge
from infra.settings import AdmissionSettings
from schemas.codec import encode
from schemas.events import (
    ApiKey,
    InferenceAdmitted,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    Quota,
    Reply,
    TenantChanged,
)
from schemas.topics import GRANT_HEADER, LIFECYCLE, TOKENS, requests_topic
from streams.admission import Admission
from streams.cache import ResponseCache
from streams.faust_shell import Record
from streams.fold_table import FoldTable
from streams.lease import Lease
from streams.turnstile import Turnstile
from tests.decisions.worlds import ID, NOW, WORK, FakeWorld
from tests.streams.bytes_taken import BytesTaken

SECRET = b"s" * 32
REQUESTS = requests_topic("interactive")
SESSION_MS = 6_000


class World(FakeWorld):
    """All that admission asks of the world, for a tenant that may do one thing at once."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self.accounts, self.counts, self.topics[REQUESTS] = accounts, self, 1
        key = ApiKey("k1", "0" * 64, ("interactive",), 0)
        self.tenants["acme"] = TenantChanged(
            "acme", "salt", (key,), 0, quotas=(Quota("interactive", concurrent_requests=1),)
        )

    async def learn(self, _topic: str) -> None: ...

    async def meet(self, _tenant: str, _key_id: str) -> None: ...

    async def meet_model(self, _model: str) -> None: ...

    def placed(self, _topic: str, _partition: int) -> None: ...

    def withdrawn(self, _topic: str, _partition: int) -> None: ...

    def confirmed(self, _topic: str, _partition: int, _offset: int) -> None: ...

    def counters(self, _partition: int, tenant: str) -> Any:
        return self.accounts.counters(tenant)


class Tokenizers:
    vocab_size = 257

    async def get(self, _version: object) -> Tokenizers:
        return self

    async def tokenise(self, *_: object) -> tuple[int, ...]:
        return (1, 2, 3)


class Producer(BytesTaken):
    """The log: it takes each admission so much later than now, by the clock of these tests."""

    def __init__(self, *late_ms: int) -> None:
        self.events: list[tuple[str, Any]] = []
        self._late_ms = list(late_ms)

    async def send(self, topic: str, event: Any, **_more: Any) -> asyncio.Future[RecordMetadata]:
        self.events.append((topic, event))
        at_ms = NOW + (self._late_ms.pop(0) if topic == LIFECYCLE else 0)
        confirmed: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        confirmed.set_result(RecordMetadata(topic, 0, TopicPartition(topic, 0), 0, at_ms, 0, 0))
        return confirmed

    def of(self, kind: type) -> list[Any]:
        return [event for _, event in self.events if isinstance(event, kind)]


class Full(Producer):
    """A log whose broker takes no work."""

    async def send(self, topic: str, event: Any, **more: Any) -> asyncio.Future[RecordMetadata]:
        if topic == WORK:
            raise RecordTooLarge("the broker takes no such record")
        return await super().send(topic, event, **more)


class Books:
    """The ledgers of the one partition, until it goes to another."""

    def __init__(self, *, goes: bool) -> None:
        self.accounts = Accounts("interactive")
        self._asked, self._goes = 0, goes

    async def of(self, _partition: int) -> Accounts | None:
        self._asked += 1
        return None if self._goes and self._asked > 1 else self.accounts

    def wrote(self, _value: bytes, _event: object) -> None: ...

    def current(self, _partition: int, accounts: Accounts) -> bool:
        return accounts is self.accounts


async def handled(producer: Producer, books: Books) -> None:
    settings, lease = AdmissionSettings(grant_secret=SECRET), Lease(SESSION_MS, lambda: NOW)
    lease.proved()
    world: Any = World(books.accounts)
    decoder = EventDecoder(settings.kafka)
    turnstile, cache = Turnstile(world, "interactive", 10_000), ResponseCache(settings, world, decoder)
    parts: Any = (producer, decoder, world, Tokenizers(), books, lease, turnstile, cache)
    grant = mint(SECRET, Grant("acme", "k1", ("interactive",), Reply(TOKENS, 1), NOW + 60_000))
    value = encode(InferenceRequested(ID, "m", prompt="hey"))
    await Admission(settings, *parts).handle(
        Record(REQUESTS, 0, 7, NOW, b"acme", value, ((GRANT_HEADER, grant.encode()),))
    )


async def test_in_time_it_is_sent_on() -> None:
    producer, books = Producer(5), Books(goes=False)
    await handled(producer, books)
    (admitted,) = producer.of(InferenceAdmitted)
    assert admitted.valid_until_ms == NOW + int(SESSION_MS * 0.6)
    assert [topic for topic, _ in producer.events] == [LIFECYCLE, WORK]


async def test_too_late_it_is_decided_anew_and_reserved_once() -> None:
    producer, books = Producer(SESSION_MS, 0), Books(goes=False)
    await handled(producer, books)
    assert [topic for topic, _ in producer.events] == [LIFECYCLE, LIFECYCLE, WORK]
    assert books.accounts.counters("acme")[""].running == 1
    for at_ms, event in zip((NOW + SESSION_MS, NOW), producer.of(InferenceAdmitted), strict=True):
        books.accounts.apply(0 if at_ms > NOW else 1, at_ms, event)
    assert books.accounts.counters("acme")[""].running == 1


async def test_work_that_cant_be_sent_once_it_is_let_in_is_taken_back_by_its_stream() -> None:
    """The log has its admission, and everybody counts it until an ending gives it back: no refusal does."""
    producer, books = Full(5, 5), Books(goes=False)
    await handled(producer, books)
    assert [topic for topic, _ in producer.events] == [LIFECYCLE, TOKENS, TOKENS, LIFECYCLE]
    admitted, *stream, refused = (event for _, event in producer.events)
    assert isinstance(refused, InferenceRejected) and stream[0] == refused
    assert books.accounts.counters("acme")[""].running == 1
    table = FoldTable(TOKENS, 1, 0, 60_000)
    outputs = [output for offset, event in enumerate(stream) for output in table.apply(offset, NOW, event)]
    (ended,) = (output for output in outputs if isinstance(output, InferenceFailed))
    for offset, event in enumerate((admitted, refused)):
        books.accounts.apply(offset, NOW, event)
    assert books.accounts.counters("acme")[""].running == 1
    books.accounts.apply(2, NOW, ended)
    counter = books.accounts.counters("acme")[""]
    assert (counter.running, counter.requests_total) == (0, 0)


async def test_too_late_and_the_partition_gone_nothing_is_sent_or_reserved() -> None:
    producer, books = Producer(SESSION_MS), Books(goes=True)
    await handled(producer, books)
    assert not producer.of(InferenceScheduled)
    assert books.accounts.counters("acme")[""].running == 0
    (void,) = producer.of(InferenceAdmitted)
    books.accounts.apply(0, NOW + SESSION_MS, void)
    assert books.accounts.counters("acme")[""].running == 0
    assert books.accounts.standing("acme", ID, 7)[0] == "new"
