"""Records that a producer compressed with zstd, snappy or lz4, for which nothing is installed here, stop nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiokafka.codec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.record import default_records

from infra.kafka import make_producer
from infra.read import read_to_end
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.topics import PLAIN, TopicSpec, core_topics, requests_topic

GOOD, SQUEEZED = b"plain", b"x" * 200_000


def zstd(data: bytes) -> bytes:
    """A Zstandard frame (RFC 8878) that stores equal bytes as one run, and others as they are."""
    head = b"\x28\xb5\x2f\xfd\xa0" + len(data).to_bytes(4, "little")
    blocks, at = [], 0
    while at < len(data):
        piece = data[at : at + 100_000]
        run = len(set(piece)) == 1
        at += len(piece)
        kind = (len(piece) << 3) | (run << 1) | (at >= len(data))
        blocks.append(kind.to_bytes(3, "little") + (piece[:1] if run else piece))
    return head + b"".join(blocks)


async def write(kafka: KafkaSettings, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain record, one that is compressed, and a plain one."""
    with monkeypatch.context() as patch:
        patch.setattr(aiokafka.codec, "has_zstd", lambda: True)
        patch.setitem(AIOKafkaProducer._COMPRESSORS, "zstd", (lambda: True, AIOKafkaProducer._COMPRESSORS["zstd"][1]))
        patch.setattr(default_records, "zstd_encode", zstd)
        patch.setattr(
            "aiokafka.producer.message_accumulator.DefaultRecordBatchBuilder",
            default_records._DefaultRecordBatchBuilderPy,
        )
        for value, codec in ((GOOD, None), (SQUEEZED, "zstd"), (GOOD, None)):
            producer = make_producer(kafka, compression_type=codec)
            await producer.start()
            await producer.send_and_wait(topic, value, partition=0)
            await producer.stop()


def test_all_topics_of_requests_are_kept_plain() -> None:
    specs = {spec.name: spec for spec in core_topics()}
    assert all(specs[requests_topic(tier)].config == PLAIN for tier in ("interactive", "batch", "shadow"))


@pytest.mark.kafka
@pytest.mark.parametrize(("config", "read"), [(PLAIN, [GOOD, SQUEEZED, GOOD]), ({}, [GOOD, GOOD])])
async def test_what_is_compressed_is_read_or_passed_over(
    kafka: KafkaSettings,
    topic_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, str],
    read: list[bytes],
) -> None:
    topic = str(await topic_of(kafka))
    await ensure(kafka, [TopicSpec(topic, 2, "id", config=config)])
    await write(kafka, topic, monkeypatch)
    assert [record.value async for record in read_to_end(kafka, topic)] == read
