"""What the reader of the other topics puts aside, and what it commits: nothing that isn't in the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError

from infra.log import NotDelivered, RecordTooLarge
from schemas.codec import Codec, encode, encode_json
from schemas.errors import HeadraceError
from schemas.events import FrontDoorSeen, ModelPromoted, RecordDeadLettered, TenantChanged
from schemas.reasons import Reason
from schemas.topics import DEAD_LETTERS, DOORS, REGISTRY, TENANTS
from streams.dead_letters import Clerk

PLACE = TopicPartition(DOORS, 0)
GOOD, JUNK, WRONG = encode(FrontDoorSeen("a")), b"\xff\x00", encode(ModelPromoted("m", "1"))


@dataclass
class Consumer:
    owned: set[TopicPartition] = field(default_factory=lambda: {PLACE})
    committed_to: list[dict[TopicPartition, int]] = field(default_factory=list)
    late: bool = False

    def assignment(self) -> set[TopicPartition]:
        return self.owned

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.late:
            raise CommitFailedError
        self.committed_to.append(offsets)


@dataclass
class Producer:
    letters: list[RecordDeadLettered] = field(default_factory=list)
    fails: Exception | None = None

    async def send_and_wait(self, topic: str, event: RecordDeadLettered, *, key: str) -> None:
        if self.fails is not None:
            raise self.fails
        assert (topic, key) == (DEAD_LETTERS, event.topic)
        self.letters.append(event)


@dataclass
class Decoder:
    fails: Exception | None = None
    codec: Codec = field(default_factory=Codec)

    async def decode_record(self, value: bytes | None) -> Any:
        if self.fails is not None:
            raise self.fails
        return self.codec.decode(value)


def records(*values: bytes | None, topic: str = DOORS, start: int = 0) -> list[Any]:
    return [
        SimpleNamespace(topic=topic, partition=0, offset=start + n, timestamp=1, key=b"k", value=value, headers=())
        for n, value in enumerate(values)
    ]


@dataclass
class Desk:
    consumer: Any = field(default_factory=Consumer)
    producer: Any = field(default_factory=Producer)
    decoder: Any = field(default_factory=Decoder)

    def __post_init__(self) -> None:
        self.clerk = Clerk(self.consumer, self.producer, self.decoder)

    @property
    def put_aside(self) -> list[tuple[int, str]]:
        return [(letter.offset, letter.reason) for letter in self.producer.letters]

    async def take(self, found: Iterable[Any], topic: str = DOORS) -> None:
        await self.clerk.take(TopicPartition(topic, 0), list(found))


async def test_junk_and_what_does_not_belong_is_put_aside_and_all_is_committed() -> None:
    desk = Desk()
    await desk.take(records(GOOD, JUNK, GOOD, WRONG, None, b"", GOOD[:-1]))
    assert desk.put_aside == [(n, "undecodable") for n in (1, 3, 4, 5, 6)]
    assert {letter.process for letter in desk.producer.letters} == {"lifecycle"}
    await desk.clerk.commit()
    await desk.clerk.commit()
    assert desk.consumer.committed_to == [{PLACE: 7}]


async def test_nothing_is_committed_while_a_letter_is_not_in_the_log() -> None:
    desk = Desk()
    await desk.take(records(GOOD))
    desk.producer.fails = NotDelivered("the broker is away")
    with pytest.raises(NotDelivered):
        await desk.take(records(JUNK, GOOD, start=1))
    await desk.clerk.commit()
    assert desk.consumer.committed_to == [{PLACE: 1}]
    desk.producer.fails = None
    await desk.take(records(JUNK, GOOD, start=1))
    await desk.clerk.commit()
    assert desk.put_aside == [(1, "undecodable")]
    assert desk.consumer.committed_to[-1] == {PLACE: 3}


async def test_a_schema_that_cannot_be_looked_up_now_is_no_fault_of_the_record() -> None:
    desk = Desk(decoder=Decoder(HeadraceError(Reason.UNAVAILABLE, "the topic schemas can't be read")))
    with pytest.raises(HeadraceError, match="schemas"):
        await desk.take(records(GOOD))
    await desk.clerk.commit()
    assert not desk.put_aside
    assert not desk.consumer.committed_to


async def test_whatever_a_record_does_those_after_it_count() -> None:
    desk = Desk(decoder=Decoder(RecursionError()))
    await desk.take(records(GOOD))
    assert desk.put_aside == [(0, "internal_error")]
    assert "RecursionError" in desk.producer.letters[0].message


async def test_of_dead_letters_nothing_is_put_aside() -> None:
    desk = Desk()
    desk.consumer.owned.add(TopicPartition(DEAD_LETTERS, 0))
    await desk.take(records(JUNK, WRONG, None, topic=DEAD_LETTERS), DEAD_LETTERS)
    assert not desk.put_aside
    await desk.clerk.commit()
    assert desk.consumer.committed_to == [{TopicPartition(DEAD_LETTERS, 0): 3}]


async def test_a_letter_that_no_topic_takes_holds_nothing_up() -> None:
    desk = Desk(producer=Producer(fails=RecordTooLarge("too large")))
    await desk.take(records(JUNK))
    await desk.clerk.commit()
    assert desk.consumer.committed_to == [{PLACE: 1}]


async def test_a_tenants_secrets_stay_where_they_are() -> None:
    desk = Desk()
    await desk.take(records(b"a salt", topic=TENANTS), TENANTS)
    assert desk.producer.letters[0].value is None


async def test_a_tenant_is_left_out_however_its_writer_spells_it() -> None:
    """What an older version wrote has another fingerprint; here, JSON hides the name."""
    spelt = encode_json(TenantChanged("acme", "a salt", (), 0)).replace(b"TenantC", b"Tenant\\u0043")
    desk = Desk()
    await desk.take(records(spelt, topic=REGISTRY), REGISTRY)
    [letter] = desk.producer.letters
    assert (letter.value, "TenantChanged doesn't belong in registry" in letter.message) == (None, True)


async def test_what_was_taken_away_meanwhile_is_not_committed() -> None:
    desk = Desk()
    desk.consumer.owned.clear()
    await desk.take(records(JUNK))
    await desk.clerk.commit()
    assert not desk.consumer.committed_to
    assert desk.put_aside == [(0, "undecodable")]


async def test_what_is_judged_is_committed_when_it_goes_to_another_and_forgotten() -> None:
    desk, other = Desk(), TopicPartition(REGISTRY, 0)
    desk.consumer.owned.add(other)
    await desk.take(records(GOOD))
    await desk.take(records(WRONG, topic=REGISTRY), REGISTRY)
    await desk.clerk.on_partitions_revoked([PLACE])
    assert desk.consumer.committed_to == [{PLACE: 1, other: 1}]
    desk.consumer.owned.discard(PLACE)
    await desk.take(records(WRONG, topic=REGISTRY, start=1), REGISTRY)
    await desk.clerk.commit()
    assert desk.consumer.committed_to[-1] == {other: 2}


async def test_a_commit_that_comes_too_late_is_made_by_the_next_owner() -> None:
    desk = Desk()
    await desk.take(records(GOOD))
    desk.consumer.late = True
    await desk.clerk.commit()
    assert not desk.consumer.committed_to
