"""Clients get the settings they were given, commit only when told, and see topics that come later."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.partitioner import DefaultPartitioner

from infra.kafka import (
    GROUPED_BYTES,
    GROUPED_WAIT_MS,
    RATE_OVER_S,
    GroupedFetch,
    connection,
    make_consumer,
    make_producer,
    partition_for,
    partitions_of,
)
from infra.settings import KafkaSettings, SettingsError
from infra.topics import ensure
from schemas.topics import TopicSpec

WAIT_S = 30.0


def test_a_key_has_the_partition_that_other_clients_give_it():
    theirs = DefaultPartitioner()
    for count in (1, 4, 8, 50):
        every = list(range(count))
        for key in (b"", b"a", b"acme", "müller".encode(), *(uuid.uuid4().hex.encode() for _ in range(200))):
            assert partition_for(key, every, every[:1]) == partition_for(key, every, []) == theirs(key, every, every)
    assert {partition_for(None, [0, 1, 2], [1]), partition_for(None, [3], [])} == {1, 3}


def test_the_way_to_the_cluster():
    assert connection(KafkaSettings("a:1")) == {"bootstrap_servers": "a:1", "security_protocol": "PLAINTEXT"}
    signed_in = connection(KafkaSettings("a:1", "SASL_SSL", "SCRAM-SHA-256", "u", "p"))
    assert signed_in["ssl_context"].check_hostname
    del signed_in["ssl_context"]
    assert signed_in == {
        "bootstrap_servers": "a:1",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "u",
        "sasl_plain_password": "p",
    }


def test_a_file_that_is_missing_or_holds_junk_is_named(tmp_path: Path):
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for path, told in ((tmp_path / "none.pem", "none.pem can't be read"), (junk, "no usable PEM certificate")):
        for field, variable in (("ssl_cafile", "HEADRACE_KAFKA_CAFILE"), ("ssl_certfile", "HEADRACE_KAFKA_CERTFILE")):
            settings = KafkaSettings("a:1", "SSL", **{field: str(path)})
            with pytest.raises(SettingsError, match=f"{variable}.*{told}"):
                connection(settings)


def test_only_records_that_come_fast_are_fetched_in_groups():
    now_s = 0.0
    fetcher = SimpleNamespace(_fetch_max_wait_ms=250, _fetch_min_bytes=1)
    consumer = cast("AIOKafkaConsumer", SimpleNamespace(_fetcher=fetcher))
    grouped = GroupedFetch(250, lambda: now_s)

    def asked_for(rate_per_s: float) -> tuple[int, int]:
        """How it fetches when so many a second have come for a while, one reading in 10 ms."""
        nonlocal now_s
        for step in range(round(2 * RATE_OVER_S * 100)):
            now_s += 0.01
            grouped.heard(consumer, int((step + 1) * rate_per_s / 100) - int(step * rate_per_s / 100))
        return fetcher._fetch_max_wait_ms, fetcher._fetch_min_bytes

    assert asked_for(100) == (250, 1)
    assert asked_for(1_000) == (GROUPED_WAIT_MS, GROUPED_BYTES)
    assert asked_for(0) == (250, 1)
    grouped.heard(consumer, 40)
    assert fetcher._fetch_min_bytes == 1, "one group that came at once is no stream"


async def test_a_pattern_finds_topics_that_come_later(kafka: KafkaSettings):
    prefix = f"pattern-{uuid.uuid4().hex[:8]}"
    await ensure(kafka, [TopicSpec(f"{prefix}.one", 1, "id")])
    consumer = make_consumer(kafka, group=prefix, metadata_max_age_ms=1_000)
    consumer.subscribe(pattern=rf"^{prefix}\..+$")
    producer = make_producer(kafka)
    await consumer.start()
    await producer.start()
    try:
        await producer.send_and_wait(f"{prefix}.one", b"1")
        assert (await asyncio.wait_for(consumer.getone(), WAIT_S)).value == b"1"
        await ensure(kafka, [TopicSpec(f"{prefix}.two", 1, "id")])
        await producer.send_and_wait(f"{prefix}.two", b"2")
        seen = {(await asyncio.wait_for(consumer.getone(), WAIT_S)).topic for _ in range(2)}  # nothing was committed
        assert seen == {f"{prefix}.one", f"{prefix}.two"}
    finally:
        await producer.stop()
        await consumer.stop()


async def test_only_what_was_committed_is_not_read_again(kafka: KafkaSettings, topic_of):
    topic = await topic_of(kafka)
    producer = make_producer(kafka)
    await producer.start()
    for value in (b"1", b"2"):
        await producer.send_and_wait(topic, value, partition=0)
    await producer.stop()

    for commit, expected in ((False, b"1"), (True, b"1"), (False, b"2")):
        consumer = make_consumer(kafka, topic, group=topic)
        await consumer.start()
        record = await asyncio.wait_for(consumer.getone(), WAIT_S)
        assert record.value == expected
        if commit:
            await consumer.commit()
        await consumer.stop()


async def test_partitions_of_a_topic_not_subscribed_to(kafka: KafkaSettings, topic_of):
    topic = await topic_of(kafka)
    consumer = make_consumer(kafka)
    await consumer.start()
    try:
        assert await partitions_of(consumer, topic) == [0, 1]
    finally:
        await consumer.stop()
