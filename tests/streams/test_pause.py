"""A partition of a real Faust consumer is paused in the middle of a flood, and read on: nothing more than what was read comes, and nothing is lost."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from pathlib import Path

import pytest

from infra.log import EventProducer
from infra.settings import AdmissionSettings, KafkaSettings
from infra.topics import ensure
from schemas.topics import HOUR_MS, TopicSpec
from streams.faust_shell import BUFFERED_RECORDS_MAX, POLLED_RECORDS_MAX, FaustShell, Record

pytestmark = pytest.mark.kafka
RECORDS, HELD_MAX, OPEN_MAX = 6_000, 300, 64
READ_ALREADY = HELD_MAX + BUFFERED_RECORDS_MAX + 2 * POLLED_RECORDS_MAX + OPEN_MAX
SETTLED_S, WAIT_S = 2.0, 60.0


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_paused_partition_is_read_no_further_and_then_to_its_end(
    kafka: KafkaSettings, tmp_path: Path, partitions: int
) -> None:
    name = f"paused-{secrets.token_hex(4)}"
    await ensure(kafka, [TopicSpec(name, partitions, "none", HOUR_MS)])
    producer = EventProducer(kafka, "test")
    await producer.start()
    come, done, gate = Counter[tuple[int, int]](), Counter[tuple[int, int]](), asyncio.Event()

    async def handle(record: Record) -> None:
        place = record.partition, record.offset
        come[place] += 1
        if record.partition == 0 and not gate.is_set():
            if sum(partition == 0 for partition, _ in come) >= HELD_MAX:
                shell.pause(0, "a test")
            async with shell.aside():
                await gate.wait()
        done[place] += 1

    shell = FaustShell(AdmissionSettings(kafka=kafka, data_dir=tmp_path), name, name, handle, OPEN_MAX)
    try:
        sent = [
            await producer.send_raw(name, b"x", partition=number % partitions) for number in range(RECORDS * partitions)
        ]
        await asyncio.gather(*sent)
        await shell.start()
        async with asyncio.timeout(WAIT_S):
            while sum(partition == 0 for partition, _ in come) < HELD_MAX or len(done) < RECORDS * (partitions - 1):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLED_S)
        assert sum(partition == 0 for partition, _ in come) <= READ_ALREADY
        gate.set()
        shell.resume(0, "a test")
        async with asyncio.timeout(WAIT_S):
            while len(done) < RECORDS * partitions:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert set(done.values()) == {1}
        assert not shell.failed.done()
    finally:
        gate.set()
        await shell.stop()
        await producer.stop()
