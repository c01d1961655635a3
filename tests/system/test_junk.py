"""Junk on every topic of the path: it is put aside and counted, the next good request is served, and nobody reads it for ever."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from aiokafka import AIOKafkaProducer

from infra.kafka import make_consumer, make_producer, partitions_of
from infra.metrics import topic_label
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.events import InferenceCancelled, InferenceRequested, Message, RecordDeadLettered, WorkerReported
from schemas.ids import request_id
from schemas.topics import TIERS, idempotency_topic, ledger_topic
from tests.system.audit import Audit, Mark
from tests.system.callers import Load
from tests.system.fixtures_models import BUSY
from tests.system.running import MODEL, ROOT, RunningStack

pytestmark = pytest.mark.timeout(240)
SERVED_S_MAX = 30.0
GOOD = encode(InferenceRequested(request_id(0, bytes(10)), MODEL, messages=(Message("user", "never to be answered"),)))
JUNK: tuple[bytes | None, ...] = (
    b"\xff\x00",
    None,
    b"",
    b"\xc3\x01" + b"\x00" * 8 + b"of a writer whom nobody knows",
    b"\xc3\x01\x00",
    GOOD[: len(GOOD) // 2],
    GOOD[:10],
    b"{",
    b'{"type": "InferenceRequested", "request_id": "\\ud800"}',
    b"[" * 50_000,
    b'{"type":' * 20_000,
    b"null",
)
ADMISSIONS = ("admission-interactive", "admission-batch")
COMPACTED = ("workers", "tenants", "schemas", *(ledger_topic(tier) for tier in TIERS))
PASSED_OVER = ("workers", "doors", "tenants", "registry", "control")
"""Read into memory by many processes: each passes junk over and counts it, and `lifecycle` puts it aside."""


@dataclass(frozen=True)
class Sent:
    topic: str
    partition: int
    offset: int


Record = tuple[str, int | None, bytes | None, bytes | None]


async def send(kafka: KafkaSettings, records: Iterable[Record], headers: list[tuple[str, bytes]]) -> list[Sent]:
    """Writes records of topic, partition, key and value; returns where they are."""
    producer: AIOKafkaProducer = make_producer(kafka)
    await producer.start()
    try:
        futures = [
            await producer.send(topic, value, key, partition, headers=headers)
            for topic, partition, key, value in records
        ]
        return [Sent(meta.topic, meta.partition, meta.offset) for meta in await asyncio.gather(*futures)]
    finally:
        await producer.stop()


async def send_junk(kafka: KafkaSettings, topics: list[str], headers: list[tuple[str, bytes]]) -> list[Sent]:
    """Every kind of junk on every partition of these topics, with a key that is no text, and without one where the topic takes that."""
    records = [
        (topic, number, key, value)
        for topic, number in await places_of(kafka, topics)
        for value in JUNK
        for key in (b"\xff\xfe", None)
        if key is not None or (value is not None and topic not in COMPACTED)
    ]
    return await send(kafka, records, headers)


async def end_in_markers(kafka: KafkaSettings, topics: list[str], headers: list[tuple[str, bytes]]) -> None:
    """One more bad record on every partition in a transaction that is committed, and in one that is not: the last thing is no record."""
    places = await places_of(kafka, topics)
    for commit in (True, False):
        async with make_producer(kafka, transactional_id=f"somebody-{commit}") as producer:
            await producer.begin_transaction()
            sent = [await producer.send(topic, b"\xff\x00", b"k", number, headers=headers) for topic, number in places]
            await asyncio.gather(*sent)
            await (producer.commit_transaction() if commit else producer.abort_transaction())


async def places_of(kafka: KafkaSettings, topics: list[str]) -> list[tuple[str, int]]:
    """All partitions of these topics."""
    async with make_consumer(kafka) as consumer:
        return [(topic, number) for topic in topics for number in await partitions_of(consumer, topic)]


def dead_letters(mark: Mark) -> dict[Sent, RecordDeadLettered]:
    found = {}
    for item in mark.records():
        if isinstance(item.event, RecordDeadLettered):
            found[Sent(item.event.topic, item.event.partition, item.event.offset)] = item.event
    return found


def times_put_aside(mark: Mark) -> Counter[Sent]:
    events = [item.event for item in mark.records()]
    return Counter(Sent(e.topic, e.partition, e.offset) for e in events if isinstance(e, RecordDeadLettered))


def served(stack: RunningStack, grant: Path) -> None:
    """A good call on each tier is answered soon."""
    client = stack.client().with_options(timeout=SERVED_S_MAX)
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "good"}])
    assert answer.choices[0].message.content == "good"
    done = stack.run([sys.executable, str(ROOT / "docs/direct.py"), str(grant), MODEL, "good too"])
    assert done.stdout.startswith("good too\n[InferenceCompleted")


def counted(stack: RunningStack, name: str, metric: str) -> Counter[str]:
    """A process's counter, by its label `topic`."""
    with httpx.Client(trust_env=False) as client:
        text = client.get(f"http://127.0.0.1:{stack.ops_ports[name]}/metrics").text
    found: Counter[str] = Counter()
    for topic, value in re.findall(rf'^{metric}_total{{[^}}]*topic="([^"]*)"[^}}]*}} ([0-9.e+]+)$', text, re.MULTILINE):
        found[topic] += int(float(value))
    return found


def letters_counted(stack: RunningStack, *names: str) -> Counter[str]:
    """What these processes have put aside, by topic; a tenant's own stream counts as `tokens`."""
    return sum((counted(stack, name, "headrace_dead_letters") for name in names), Counter())


def of_topics(sent: list[Sent]) -> Counter[str]:
    """How many there are of each, as `letters_counted` has them."""
    return Counter(topic_label(place.topic) for place in sent)


def await_passed_over(stack: RunningStack, name: str, topic: str) -> None:
    stack.until(lambda: counted(stack, name, "headrace_records_passed_over")[topic] >= len(JUNK) - 1)


@pytest.fixture(scope="module")
def grant(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grant") / "grant.json"
    path.write_text(stack.command("tenants", "grant", "acme", "--json").stdout)
    return path


@pytest.fixture
def headers(grant: Path) -> list[tuple[str, bytes]]:
    return [("grant", json.loads(grant.read_text())["grant"].encode()), ("kind", b"\xff")]


@pytest.mark.parametrize("granted", [True, False])
def test_on_the_topics_of_requests(
    stack: RunningStack, grant: Path, headers: list[tuple[str, bytes]], granted: bool
) -> None:
    mark, before = Mark(stack, "dead-letters"), letters_counted(stack, *ADMISSIONS)
    topics = ["requests.interactive", "requests.batch"]
    sent = stack.thread.run(send_junk(stack.kafka, topics, headers if granted else []))
    served(stack, grant)
    found = stack.until(lambda: (letters := dead_letters(mark)).keys() >= set(sent) and letters)
    for letter in found.values():
        assert letter.reason in ("undecodable", "invalid_request", "invalid_grant")
        assert "grant" not in letter.headers
        assert letter.process == "admission"
    stack.until(lambda: letters_counted(stack, *ADMISSIONS) - before >= of_topics(sent))


def test_a_request_that_was_put_aside_is_asked_again(stack: RunningStack) -> None:
    """It had no grant; an operator gives it one."""
    mark = Mark(stack, "dead-letters")
    request = encode(InferenceRequested(request_id(0, b"put aside "), MODEL, messages=(Message("user", "at last"),)))
    (place,) = stack.thread.run(send(stack.kafka, [("requests.interactive", None, b"acme", request)], []))
    stack.until(lambda: place in dead_letters(mark))
    listed = stack.command("dead-letters", "list", "--topic", place.topic, "--json").stdout.splitlines()
    letters = {(found["partition"], found["offset"]): found["id"] for found in map(json.loads, listed)}
    number = str(letters[place.partition, place.offset])
    asked = json.loads(stack.command("dead-letters", "retry", number, "--json").stdout)
    told = stack.ended(asked["request_id"])
    assert told.facts["outcome"] == "completed"
    assert "was retried already" in stack.command("dead-letters", "retry", number, check=False).stderr


def test_on_the_topics_of_work_and_tokens(stack: RunningStack, grant: Path, headers: list[tuple[str, bytes]]) -> None:
    mark, before = Mark(stack, "dead-letters"), letters_counted(stack, "worker", "endings")
    topics = [f"work.{MODEL}.1.interactive", f"work.{MODEL}.1.batch", "tokens", "tokens.acme"]
    sent = stack.thread.run(send_junk(stack.kafka, topics, headers))
    served(stack, grant)
    found = stack.until(lambda: (letters := dead_letters(mark)).keys() >= set(sent) and letters)
    assert all("grant" not in letter.headers for letter in found.values())
    assert {(letter.topic.split(".")[0], letter.process) for letter in found.values()} == {
        ("work", "worker"),
        ("tokens", "endings"),
    }
    stack.until(lambda: letters_counted(stack, "worker", "endings") - before >= of_topics(sent))


def test_on_the_topics_that_are_read_into_memory(
    stack: RunningStack, grant: Path, headers: list[tuple[str, bytes]]
) -> None:
    mark = Mark(stack, "dead-letters")
    tiers = [name for tier in TIERS for name in (ledger_topic(tier), idempotency_topic(tier))]
    topics = [*PASSED_OVER, "lifecycle", "answers", "schemas", *tiers]
    sent = stack.thread.run(send_junk(stack.kafka, topics, headers))
    stack.thread.run(send_junk(stack.kafka, ["dead-letters"], headers))
    served(stack, grant)
    for name, topic in (
        ("admission-interactive", "tenants"),
        ("admission-batch", "workers"),
        ("admission-interactive", "doors"),
        ("bridge", "registry"),
        ("worker", "control"),
    ):
        await_passed_over(stack, name, topic)
    found = stack.until(lambda: (letters := dead_letters(mark)).keys() >= set(sent) and letters)
    assert {letter.process for letter in found.values()} == {"lifecycle"}
    assert all("grant" not in letter.headers for letter in found.values())
    assert not [letter for letter in found if letter.topic == "dead-letters"]
    assert set(times_put_aside(mark).values()) == {1}


def test_letters_of_these_topics_are_listed_shown_and_dropped(
    stack: RunningStack, headers: list[tuple[str, bytes]]
) -> None:
    mark = Mark(stack, "dead-letters")
    (place,) = stack.thread.run(send(stack.kafka, [("doors", None, b"d", b"\xff\x07")], headers))
    stack.until(lambda: place in dead_letters(mark))

    def listed() -> dict[int, str]:
        lines = stack.command("dead-letters", "list", "--topic", "doors", "--json").stdout.splitlines()
        return {found["offset"]: str(found["id"]) for found in map(json.loads, lines)}

    number = listed()[place.offset]
    assert "put aside by lifecycle" in stack.command("dead-letters", "show", number).stdout
    assert "tells again by itself" in stack.command("dead-letters", "retry", number, check=False).stdout
    stack.command("dead-letters", "drop", number)
    assert place.offset not in listed()


def test_good_events_on_the_wrong_topic(stack: RunningStack, grant: Path, headers: list[tuple[str, bytes]]) -> None:
    mark = Mark(stack, "dead-letters")
    report = encode(WorkerReported("w", MODEL, "1", "ready", (), 1, 0, 0))
    cancel = encode(InferenceCancelled(request_id(0, bytes(10)), "acme"))

    put_aside: list[Record] = [
        *((topic, None, b"acme", report) for topic in ("requests.interactive", "requests.batch", "tokens")),
        *((topic, None, b"acme", cancel) for topic in ("tokens.acme", f"work.{MODEL}.1.interactive")),
    ]
    put_aside += [(topic, None, b"w", GOOD) for topic in (*PASSED_OVER, "schemas", "lifecycle", "answers")]
    sent = stack.thread.run(send(stack.kafka, put_aside, headers))
    stack.thread.run(send(stack.kafka, [("dead-letters", None, b"w", GOOD)], headers))
    served(stack, grant)
    stack.until(lambda: dead_letters(mark).keys() >= set(sent))


def test_between_the_tokens_of_streams_that_are_taken_over(
    stack: RunningStack, busy: str, headers: list[tuple[str, bytes]]
) -> None:
    audit = Audit(stack)
    load = Load(stack, busy, calls=12, tokens=20, token_ms=200)
    load.until_flowing(3)
    topics = ["tokens", f"work.{BUSY}.1.interactive", "control"]
    stack.thread.run(send_junk(stack.kafka, topics, headers))
    before = stack.pid("busy-a")
    stack.kill("busy-a")
    stack.thread.run(send_junk(stack.kafka, topics, headers))
    heard = load.heard()
    assert all(call.whole for call in heard), [call for call in heard if not call.whole]
    assert len(audit.settled()) == 12
    stack.until_restarted("busy-a", before)


def test_everything_comes_up_again_over_junk(
    stack: RunningStack, grant: Path, headers: list[tuple[str, bytes]]
) -> None:
    async def everywhere() -> list[str]:
        consumer = make_consumer(stack.kafka)
        await consumer.start()
        try:
            return [name for name in await consumer.topics() if not name.startswith("__")]
        finally:
            await consumer.stop()

    topics = stack.thread.run(everywhere())
    mark = Mark(stack, "dead-letters")
    stack.thread.run(send_junk(stack.kafka, topics, headers))
    stack.kill_all()
    served(stack, grant)
    assert times_put_aside(mark)
    stack.thread.run(end_in_markers(stack.kafka, topics, headers))
    stack.kill_all()
    served(stack, grant)
    assert max(times_put_aside(mark).values()) <= 3  # once, and once more for each crash that came before the commit


def test_commands_say_nothing_of_junk(stack: RunningStack, headers: list[tuple[str, bytes]]) -> None:
    stack.thread.run(send_junk(stack.kafka, ["tenants", "registry"], headers))
    for arguments in (("tenants", "list"), ("models", "list")):
        assert stack.command(*arguments).stderr == ""
    refused = stack.command("tenants", "grant", "nobody", check=False)
    assert len(refused.stderr.splitlines()) == 1
