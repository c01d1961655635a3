"""When ledgers are saved: on a real broker, with a lease that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from decisions.ledger import Cost, Hold
from decisions.ledger_rows import Open, Row
from infra.log import EventDecoder, EventProducer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.events import InferenceAdmitted, LedgerSaved, Position, Reply
from schemas.topics import INTERACTIVE, LIFECYCLE, TOKENS, ledger_topic, requests_topic
from streams import accounts
from streams.accounts import OPEN_AT_ONCE, Ledgers
from streams.lease import Lease
from tests.decisions.ledger_site import event_of
from tests.streams.site import WAIT_S, new_id, now_ms

pytestmark = pytest.mark.kafka
PARTITION = 0
SESSION_MS = 1_000_000


class Partition:
    """A partition's ledgers as one process holds them, and a tenant with requests in it."""

    def __init__(self, kafka: KafkaSettings, producer: EventProducer) -> None:
        self.kafka, self.producer = kafka, producer
        self.tenant = f"t{new_id()[-10:]}"
        self.ledgers = Ledgers(kafka, INTERACTIVE, producer, EventDecoder(kafka))
        self.now_ms = now_ms()
        self.lease = Lease(SESSION_MS, lambda: self.now_ms)
        self.taken_surely: list[bool] = []

    def start(self) -> None:
        def committed(_: int) -> int:
            self.taken_surely.append(self.lease.holds)
            return 0

        self.ledgers.start(committed, self.lease)
        self.lease.proved()
        self.ledgers.assigned([PARTITION])

    async def let_in(self) -> str:
        """One more request, as told and then folded: its id."""
        event = InferenceAdmitted(
            new_id(), self.tenant, "k1", "m", "1", INTERACTIVE, Reply(TOKENS, 3), "work", 0, 3, 7, 10,
            now_ms(), now_ms() + 3_600_000, Position(requests_topic(INTERACTIVE), PARTITION, 0),
        )  # fmt: skip
        await self.producer.send_and_wait(LIFECYCLE, event, key=self.tenant, partition=PARTITION)

        def folded() -> bool:
            known = self.ledgers.known(PARTITION)
            return known is not None and known.reply_of(self.tenant, event.request_id) is not None

        await until(folded)
        return event.request_id

    async def saved(self) -> set[str]:
        """What the tenant's row says is open."""
        found: set[str] = set()
        decoder = EventDecoder(self.kafka)
        async for record in read_to_end(self.kafka, ledger_topic(INTERACTIVE), only={PARTITION}):
            row = await decoder.decode(record.value) if record.value else None
            if isinstance(row, LedgerSaved) and row.tenant == self.tenant:
                found = {held.request_id for held in row.open}
        return found

    async def until_saved(self, *requests: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.saved() != set(requests):  # noqa: ASYNC110  # the log tells nobody
                await asyncio.sleep(0.1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


@pytest.fixture
async def held(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Partition]:
    monkeypatch.setattr(accounts, "SAVE_S", 0.01)
    producer = EventProducer(kafka, "test")
    await producer.start()
    partition = Partition(kafka, producer)
    try:
        yield partition
    finally:
        await partition.ledgers.stop()
        await producer.stop()


async def test_rows_are_taken_only_while_the_partition_is_surely_ours(held: Partition) -> None:
    """Who has it next takes older rows away: one that is written late could be newer, and would be missed."""
    held.start()
    first = await held.let_in()
    await held.until_saved(first)
    held.now_ms += SESSION_MS
    second = await held.let_in()
    await held.ledgers.save_last()
    assert all(held.taken_surely)
    assert await held.saved() == {first} != {second}


async def test_what_was_decided_last_is_saved_before_the_partition_is_given_up(
    held: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "SAVE_S", 3_600.0)
    held.start()
    last = await held.let_in()
    ready = await held.ledgers.of(PARTITION)
    assert ready is not None
    assert await held.ledgers.remembers(PARTITION, ready)
    await held.ledgers.save_last()
    assert await held.saved() == {last}


async def test_others_have_their_turns_while_a_large_row_is_made() -> None:
    hold = Hold(now_ms(), Cost(5), ("",))
    opened = tuple((new_id(), Open(hold, now_ms(), Reply(TOKENS, 1), "pool")) for _ in range(100 * OPEN_AT_ONCE))
    row = Row("acme", INTERACTIVE, 7, now_ms(), open=opened)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    deciding = asyncio.create_task(others())
    value = await accounts._value(row, 0.0)
    deciding.cancel()
    assert turns >= 100
    assert value == encode(event_of(row))
