"""The embedded broker keeps its data, dies with its owner, and says clearly why it can't start."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from infra.broker import BrokerError, EmbeddedKafka, broker_properties, class_path, jars_folder
from infra.kafka import make_consumer, make_producer
from infra.ports import PortInUse
from infra.settings import KafkaSettings
from infra.topics import ensure
from schemas.topics import TopicSpec

GONE_WITHIN_S = 10.0


def gone(pid: int) -> bool:
    limit = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < limit:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


async def put(settings: KafkaSettings, value: bytes) -> int:
    producer = make_producer(settings)
    await producer.start()
    try:
        return int((await producer.send_and_wait("kept", value)).offset)
    finally:
        await producer.stop()


async def read(settings: KafkaSettings, count: int) -> list[bytes]:
    consumer = make_consumer(settings, "kept")
    await consumer.start()
    try:
        return [(await asyncio.wait_for(consumer.getone(), 30)).value for _ in range(count)]
    finally:
        await consumer.stop()


def test_records_survive_a_restart_and_a_crash(spare_broker: EmbeddedKafka):
    broker, port = spare_broker, spare_broker.port
    asyncio.run(ensure(broker.settings, [TopicSpec("kept", 1, "id")]))
    assert asyncio.run(put(broker.settings, b"one")) == 0

    broker.restart()
    assert asyncio.run(put(broker.settings, b"two")) == 1

    killed = broker.pid
    broker.kill()
    assert broker.pid is None
    assert killed is not None
    assert gone(killed)
    broker.start()
    assert broker.port == port
    assert asyncio.run(read(broker.settings, 2)) == [b"one", b"two"]

    with pytest.raises(BrokerError, match=f"already runs on .*: process {broker.pid}, port {port}"):
        EmbeddedKafka(broker.data_dir).start()


def test_it_dies_with_an_owner_that_is_killed(tmp_path: Path):
    owner_code = """
        import os, signal, sys
        from pathlib import Path
        from infra.broker import EmbeddedKafka
        broker = EmbeddedKafka(Path(sys.argv[1]))
        broker.start()
        print(broker.pid, flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(owner_code), str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, start_new_session=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.send_signal(signal.SIGKILL)
    assert gone(pid)


async def test_a_paused_broker_answers_nothing_until_resumed(spare_broker: EmbeddedKafka):
    await ensure(spare_broker.settings, [TopicSpec("paused", 1, "id")])
    producer = make_producer(spare_broker.settings)
    await producer.start()
    try:
        await producer.send_and_wait("paused", b"before")
        spare_broker.pause()
        try:
            waiting = await producer.send("paused", b"while")
            done, _ = await asyncio.wait([waiting], timeout=0.5)
            assert not done
        finally:
            spare_broker.resume()
        assert await asyncio.wait_for(waiting, 30)
    finally:
        await producer.stop()


def test_a_port_in_use_is_named_before_java_starts(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        own = re.escape(psutil.Process().name())  # vLLM in the same process renames it
        with pytest.raises(PortInUse, match=f"port {port} .Kafka. is in use by {own}"):
            EmbeddedKafka(tmp_path, port).start()
    assert not (tmp_path / "kafka.log").exists()


def test_a_broker_that_dies_while_starting_shows_its_last_words(tmp_path: Path):
    broker = EmbeddedKafka(tmp_path, overrides={"log.retention.hours": "0"})
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=x\n")
    with pytest.raises(BrokerError, match=r"(?s)stopped with code 1 while starting.*kafka\.log.*\n.*"):
        broker.start()
    assert broker.pid is None
    broker.stop()


def test_data_of_an_impossible_shape_is_refused_by_the_formatter(tmp_path: Path):
    with pytest.raises(BrokerError, match=r"(?s)can't be prepared for Kafka: .*process\.roles"):
        EmbeddedKafka(tmp_path, overrides={"process.roles": "nonsense"}).start()


def test_a_stale_state_file_is_not_taken_for_a_running_broker(tmp_path: Path):
    mine = psutil.Process()
    (tmp_path / "broker.json").write_text(json.dumps({"pid": mine.pid, "created": 1.0, "port": 1}))
    EmbeddedKafka(tmp_path)._check_unused()
    (tmp_path / "broker.json").write_text("{")
    EmbeddedKafka(tmp_path)._check_unused()


def test_jars_are_listed_once_and_checked(tmp_path: Path):
    listed = class_path(jars_folder())
    assert len(listed) > 30
    assert any(jar.name.startswith("kafka_2.13") for jar in listed)
    (tmp_path / "jars.json").write_text(json.dumps([str(jar) for jar in listed]))
    assert class_path(tmp_path) == listed
    assert jars_folder({"HEADRACE_CACHE": "/x"}) == Path("/x/kafka-4.4.0")


def test_the_log_keeps_its_own_time():
    properties = broker_properties(Path("/x"), 1, 2)
    assert properties["log.message.timestamp.type"] == "LogAppendTime"
    assert properties["auto.create.topics.enable"] == "false"
