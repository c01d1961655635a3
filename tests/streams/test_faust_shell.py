from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka import ConsumerRecord
from faust.types import TP
from hypothesis import given
from hypothesis import strategies as st

from infra.kafka import make_admin, make_producer
from infra.settings import AdmissionSettings, KafkaSettings
from infra.topics import ensure
from schemas.errors import HeadraceError
from schemas.topics import TopicSpec
from streams.acks import InOrderAcks, Taken
from streams.faust_shell import FaustShell, Parked, Record
from streams.faust_transport import Message
from streams.lease import Lease

WAIT_S = 40.0


@given(st.integers(1, 30).flatmap(lambda count: st.permutations(range(count))), st.integers(0, 30))
def test_nothing_is_acked_before_all_below_it_is_done(order: list[int], stop_at: int) -> None:
    acks, acked = InOrderAcks(), list[int]()
    done = [acks.take(("t", 0), lambda number=number: acked.append(number)) for number in range(len(order))]  # type: ignore[misc]
    finished = set()
    for number in order[:stop_at]:
        done[number]()
        done[number]()
        finished.add(number)
        below = next((i for i in range(len(order)) if i not in finished), len(order))
        assert acked == list(range(below))
    assert acks.open == len(order) - len(acked)


def test_partitions_do_not_wait_for_each_other_and_lost_ones_ack_nothing() -> None:
    acks, acked = InOrderAcks(), list[str]()

    def ack(name: str) -> Callable[[], None]:
        return lambda: acked.append(name)

    acks.take(("t", 0), ack("a"))
    late = acks.take(("t", 0), ack("b"))
    acks.take(("t", 1), ack("c"))()
    assert acked == ["c"]
    acks.drop([("t", 0)])
    late()
    again = acks.take(("t", 0), ack("a again"))
    late()
    again()
    assert acked == ["c", "a again"]


class Faust:
    """What the shell asks of the app, of one generation of the group: events are acked, and nothing is paused."""

    def __init__(self, acked: list[int]) -> None:
        self.consumer_generation_id = 1
        self.flow_control = SimpleNamespace(is_active=lambda: True)
        self.monitor = SimpleNamespace(stream_inbound_time={})
        self.consumer = SimpleNamespace(ack=lambda message: acked.append(message.offset))


def queued(offsets: range, generation_id: int = 1) -> asyncio.Queue[Message]:
    """Messages that came together."""
    queue = asyncio.Queue[Message]()
    for offset in offsets:
        record = ConsumerRecord("t", 0, offset, 0, 0, None, b"", None, -1, 0, ())
        queue.put_nowait(Message(TP("t", 0), record, generation_id))
    return queue


@asynccontextmanager
async def taking(shell: FaustShell, queue: asyncio.Queue[Message]) -> AsyncIterator[None]:
    """The shell takes what is there; what it began has come to its end afterwards."""
    task = asyncio.create_task(shell._take(queue))
    await asyncio.sleep(0.01)
    try:
        yield
        await asyncio.sleep(0.01)
        await asyncio.gather(*shell._tasks)
    finally:
        task.cancel()


async def test_it_is_not_ready_before_it_was_assigned_though_faust_revokes_first(tmp_path: Path) -> None:
    async def handle(_record: Record) -> None: ...

    shell = FaustShell(AdmissionSettings(data_dir=tmp_path), "t", "t", handle, open_max=1)
    await shell._on_revoked(None, [])
    assert shell.not_ready
    await shell._on_assigned(None, [])
    assert shell.not_ready is None


async def test_what_waits_for_a_slot_when_its_partition_goes_is_not_acked(tmp_path: Path) -> None:
    """It is delivered again, behind records that aren't done: its ack would commit past them."""
    gate, acked = asyncio.Event(), list[int]()

    async def handle(_record: Record) -> None:
        await gate.wait()

    shell = FaustShell(AdmissionSettings(data_dir=tmp_path), "t", "t", handle, open_max=1)
    shell._app = Faust(acked)
    async with taking(shell, queued(range(3))):
        await shell._on_revoked(None, [SimpleNamespace(topic="t", partition=0)])
        gate.set()
    assert acked == []
    async with taking(shell, queued(range(3, 5))):
        pass
    assert acked == [3, 4]


async def test_what_is_parked_is_acked_in_its_order_once_it_was_handled_again(tmp_path: Path) -> None:
    kept, acked, gate = dict[int, Taken](), list[int](), False

    async def handle(record: Record) -> None:
        if record.offset == 1 and not gate:
            raise Parked(lambda done: kept.update({record.offset: done}))

    shell = FaustShell(AdmissionSettings(data_dir=tmp_path), "t", "t", handle, open_max=1)
    shell._app = Faust(acked)
    came = queued(range(3))
    record = ConsumerRecord("t", 0, 1, 0, 0, None, b"", None, -1, 0, ())
    async with taking(shell, came):
        pass
    assert (acked, shell._acks.ahead(("t", 0))) == ([0], 1)
    gate = True
    await (await shell.again(record, kept[1]))
    assert (acked, shell._acks.ahead(("t", 0))) == ([0, 1, 2], 0)


async def test_what_is_parked_in_a_partition_that_goes_is_not_handled_again(tmp_path: Path) -> None:
    kept, acked, handled = list[Taken](), list[int](), list[int]()

    async def handle(record: Record) -> None:
        handled.append(record.offset)
        raise Parked(kept.append)

    shell = FaustShell(AdmissionSettings(data_dir=tmp_path), "t", "t", handle, open_max=1)
    shell._app = Faust(acked)
    async with taking(shell, queued(range(1))):
        pass
    await shell._on_revoked(None, [SimpleNamespace(topic="t", partition=0)])
    await (await shell.again(ConsumerRecord("t", 0, 0, 0, 0, None, b"", None, -1, 0, ()), kept[0]))
    kept[0]()
    assert (handled, acked) == ([0], [])


async def test_a_partition_goes_only_when_what_was_let_in_there_is_told_or_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.faust_shell.FINISH_S_MAX", 0.0)
    gate = asyncio.Event()

    async def handle(_record: Record) -> None:
        await gate.wait()

    lease = Lease(1_000)
    shell = FaustShell(AdmissionSettings(data_dir=tmp_path), "t", "t", handle, open_max=1, lease=lease)
    shell._app = Faust([])
    async with taking(shell, queued(range(1))):
        lease.proved()
        await shell._on_revoked(None, [SimpleNamespace(topic="t", partition=0)])
        assert not lease.left_s
        gate.set()


async def test_what_was_read_before_a_rebalance_is_not_taken(tmp_path: Path) -> None:
    taken, acked = list[int](), list[int]()

    async def handle(record: Record) -> None:
        taken.append(record.offset)

    shell = FaustShell(AdmissionSettings(data_dir=tmp_path), "t", "t", handle, open_max=1)
    shell._app = Faust(acked)
    queue = queued(range(3), generation_id=0)
    async with taking(shell, queue):
        queue.put_nowait(queued(range(1, 2)).get_nowait())
    assert (taken, acked) == ([1], [1])


@pytest.mark.kafka
async def test_offsets_follow_the_slowest_and_a_crash_of_faust_is_told(kafka: KafkaSettings, tmp_path: Path) -> None:
    name = f"shell-{secrets.token_hex(4)}"
    await ensure(kafka, [TopicSpec(name, 1, "none")])
    producer = make_producer(kafka)
    await producer.start()
    for i in range(10):
        await producer.send_and_wait(name, b"%d" % i, partition=0)
    await producer.stop()
    taken: list[int] = []
    gate = asyncio.Event()

    async def handle(record: Record) -> None:
        taken.append(record.offset)
        if record.offset == 4:
            await gate.wait()

    shell = FaustShell(AdmissionSettings(kafka=kafka, data_dir=tmp_path), name, name, handle, 64)
    await shell.start()
    try:
        await until(lambda: len(taken) == 10)
        assert shell.not_ready is None
        await committed(kafka, name, 4)
        await asyncio.sleep(1.5)
        await committed(kafka, name, 4)
        gate.set()
        await committed(kafka, name, 10)
        await shell._app.crash(RuntimeError("as a test"))
        with pytest.raises(HeadraceError, match="as a test"):
            await asyncio.wait_for(shell.failed, WAIT_S)
    finally:
        await shell.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def committed(kafka: KafkaSettings, group: str, offset: int) -> None:
    """Wait until exactly this offset is the group's."""
    admin = make_admin(kafka)
    await admin.start()
    try:
        async with asyncio.timeout(WAIT_S):
            found: list[int] = []
            while found != [offset]:
                found = [place.offset for place in (await admin.list_consumer_group_offsets(group)).values()]
                await asyncio.sleep(0.1)
    finally:
        await admin.close()
