"""Junk on every topic that is read into memory: one letter each, by a process that is killed, too, and nobody else is hurt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from aiokafka import ConsumerRecord

from decisions.dead_letters import BELONGING, Letters
from infra.broker import EmbeddedKafka
from infra.read import read_to_end
from infra.settings import KafkaSettings
from infra.topics import ensure_core
from schemas.codec import Codec, encode, encode_json
from schemas.errors import Undecodable
from schemas.events import InferenceFailed, RecordDeadLettered, SchemaPublished, TenantChanged, WorkerReported
from schemas.topics import DEAD_LETTERS, RECORD_MAX_BYTES, SCHEMAS, TENANTS, TOKENS, core_topics
from tests.streams.lives import admit
from tests.streams.site import Agent, Site

pytestmark = pytest.mark.kafka
REPORT = encode(WorkerReported("w", "m", "1", "ready", (), 1, 0, 0))
SECRET = TenantChanged("acme", "a very secret salt", (), 0)
JUNK: dict[str, bytes] = {
    "no Avro": b"\xff\x00",
    "empty": b"",
    "unknown schema": b"\xc3\x01" + b"\x00" * 8 + b"of a writer whom nobody knows",
    "cut": REPORT[: len(REPORT) // 2],
    "no JSON": b"{",
    "too large to be kept whole": b"x" * (RECORD_MAX_BYTES - 150),
}
TRIES = 200
COMPACTED = {spec.name for spec in core_topics() if spec.compacted}


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSettings]:
    """A broker of its own: what is compacted keeps its junk, and other tests start over these topics."""
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as broker:
        asyncio.run(ensure_core(broker.settings))
        yield broker.settings


async def put(site: Site, topic: str, value: bytes | None, key: bytes = b"k") -> ConsumerRecord:
    """Writes a record with a grant."""
    return await (await site.producer.send_raw(topic, value, key, 0, [("grant", b"very secret"), ("trace", b"1")]))


async def junk_on(site: Site, topic: str) -> dict[int, str]:
    """One record of each kind; the kinds by offset."""
    sent = {(await put(site, topic, value)).offset: kind for kind, value in JUNK.items()}
    wrong = encode(SECRET) if topic != TENANTS else REPORT
    sent[(await put(site, topic, wrong)).offset] = "wrong event"
    nobody = b"\xff\xfe" if topic in COMPACTED else b"k"
    sent[(await put(site, topic, None, nobody)).offset] = "null"
    return sent


async def letters(kafka: KafkaSettings) -> list[RecordDeadLettered]:
    """All of them, in order."""
    codec, found = Codec(), list[RecordDeadLettered]()
    async for record in read_to_end(kafka, DEAD_LETTERS):
        try:
            event = codec.decode(record.value)
        except Undecodable:
            continue
        if isinstance(event, RecordDeadLettered):
            found.append(event)
    return found


async def of(site: Site, sent: dict[str, dict[int, str]]) -> list[RecordDeadLettered]:
    """The letters of these records, once each has one."""
    places = {(topic, offset) for topic, kinds in sent.items() for offset in kinds}
    for topic, offset in places:
        await site.buried(SimpleNamespace(topic=topic, partition=0, offset=offset))
    return [letter for letter in await letters(site.kafka) if (letter.topic, letter.offset) in places]


@pytest.fixture
def agent(kafka: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A running keeper of deadlines; none but it reads."""
    agent = Agent("lifecycle", kafka, tmp_path_factory.mktemp("lifecycle"))
    agent.start()
    yield agent
    assert agent.stop() == 0, agent.last_words()


async def test_junk_on_each_topic_is_put_aside_once(site: Site, agent: Agent) -> None:
    sent = {topic: await junk_on(site, topic) for topic in BELONGING}
    found = await of(site, sent)
    assert set(Counter((letter.topic, letter.offset) for letter in found).values()) == {1}
    for letter in found:
        kind = sent[letter.topic][letter.offset]
        assert (letter.reason, letter.process, letter.headers) == ("undecodable", "lifecycle", {"trace": b"1"}), kind
        if letter.topic == TENANTS or kind == "wrong event":
            assert not letter.value, "a tenant's secrets, on whatever topic"
        elif kind.startswith("too large"):
            assert "bytes are kept" in letter.message
        else:
            assert letter.value == JUNK.get(kind), kind
    counted = {line for line in agent.metrics().splitlines() if line.startswith("headrace_dead_letters_total")}
    for topic in BELONGING:
        assert any(f'topic="{topic}"' in line for line in counted), counted


@pytest.mark.parametrize("leave", [Agent.kill, Agent.stop])
async def test_who_starts_again_makes_no_second_letter(
    site: Site, agent: Agent, leave: Callable[[Agent], object]
) -> None:
    junk = {topic: {(await put(site, topic, b"\xff\x00")).offset: "junk"} for topic in BELONGING}
    await of(site, junk)
    leave(agent)
    meanwhile = {topic: {(await put(site, topic, b"\xff\x01")).offset: "junk"} for topic in BELONGING}
    agent.start()
    await of(site, meanwhile)
    after = {topic: {(await put(site, topic, b"\xff\x02")).offset: "junk"} for topic in BELONGING}
    await of(site, after)
    everything = {topic: junk[topic] | meanwhile[topic] | after[topic] for topic in BELONGING}
    found, one = await of(site, everything), Letters()
    assert sum(one.hear(number, letter) for number, letter in enumerate(found)) == 3 * len(BELONGING)
    if leave is Agent.stop:
        assert len(found) == 3 * len(BELONGING), "who stops in good order has committed all"


async def test_what_is_in_dead_letters_itself_makes_no_letter_and_deadlines_are_kept(site: Site, agent: Agent) -> None:
    for value in (*JUNK.values(), REPORT):
        await put(site, DEAD_LETTERS, value)
    asked = await admit(site)
    await site.of(TOKENS, InferenceFailed, asked.request_id)
    label = f'headrace_records_passed_over_total{{topic="{DEAD_LETTERS}"}}'
    for _ in range(TRIES):
        if f"{label} {len(JUNK)}.0" in agent.metrics():
            break
        await asyncio.sleep(0.2)
    assert f"{label} {len(JUNK)}.0" in agent.metrics()
    assert not [letter for letter in await letters(site.kafka) if letter.topic == DEAD_LETTERS]


async def test_events_that_belong_make_no_letters(site: Site, agent: Agent) -> None:
    """Those of a version that is newer than this one, too."""
    before = len(await letters(site.kafka))
    newer = SchemaPublished("0" * 16, "NotInventedYet", "{}")
    await site.producer.send_and_wait(SCHEMAS, newer, key=newer.fingerprint)
    await put(site, "workers", None, b"w")
    await put(site, TENANTS, encode_json(SECRET), b"acme")
    await admit(site)
    await of(site, {topic: {(await put(site, topic, b"\xff\x00")).offset: "last"} for topic in BELONGING})
    assert len(await letters(site.kafka)) == before + len(BELONGING)
