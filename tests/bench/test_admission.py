from __future__ import annotations

import secrets
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.admission import PEER, QUOTA, TENANTS, Found, Load, _grants, _rows, _steps_us
from bench.reports import COUNT, reported
from cli.registry import read_tenants
from decisions.placement import place
from decisions.waiting import outlook
from infra import metrics
from infra.directory import WorkerDirectory
from infra.grants import read
from infra.log import EventProducer
from infra.ports import free_port
from infra.settings import KafkaSettings
from infra.supervisor import ChildSpec, Supervisor
from infra.telemetry import OpsServer
from infra.topics import ensure
from schemas.errors import HeadraceError
from schemas.topics import HOUR_MS, INTERACTIVE, TopicSpec, work_topic

WAIT_S = 20.0


def test_a_core_and_both_ends_of_the_latency_have_a_row() -> None:
    rows = _rows(Found(1_600, 1_500, [4.0] * 99 + [20.0]), Found(3_200, 3_000, [2.0] * 100), (1_200, 2_000))

    assert [(row.metric, row.at, row.ours, row.theirs, row.ratio, row.peer) for row in rows] == [
        ("requests_per_s_per_core", "max", 1_600, 3_200, 0.5, PEER),
        ("requests_per_s", "max", 1_500, 3_000, 0.5, PEER),
        ("requests_per_s_per_core", "max, 2 processes", 1_200, 1_600, 0.75, "one process"),
        ("requests_per_s", "max, 2 processes", 2_000, 1_500, pytest.approx(1.333), "one process"),
        ("latency_p50_ms", "750/s", 4, 2, 2, PEER),
        ("latency_p99_ms", "750/s", pytest.approx(4.16), 2, pytest.approx(2.08), PEER),
    ]


@pytest.mark.kafka
async def test_each_tenant_has_a_quota_and_a_grant_that_holds(kafka: KafkaSettings) -> None:
    secret = secrets.token_hex(32)
    grants = await _grants(kafka, secret)

    known = await read_tenants(kafka)
    assert len({name for name, _ in grants}) == TENANTS
    for name, grant in grants:
        assert known[name].quotas == (QUOTA,)
        assert read(secret.encode(), grant).tenant == name
        assert read(secret.encode(), grant).key_id in [key.key_id for key in known[name].keys]


@pytest.mark.kafka
async def test_what_a_process_carries_is_measured_between_its_topics(kafka: KafkaSettings, tmp_path: Path) -> None:
    """The peer itself, with a tenth of the load: each record is found at both ends, by its own time."""
    source, target = (f"bench-{name}-{secrets.token_hex(4)}" for name in ("from", "to"))
    await ensure(kafka, [TopicSpec(name, 2, "tenant", HOUR_MS) for name in (source, target)])
    producer = EventProducer(kafka, "bench")
    await producer.start()
    async with Supervisor(tmp_path) as supervisor:
        program = ("-m", "bench.relay", kafka.bootstrap, source, target)
        await supervisor.start(ChildSpec("relay", (sys.executable, *program)))
        stack: Any = SimpleNamespace(kafka=kafka, supervisor=supervisor)
        load = Redirected(stack, producer, [("bench-a", b"grant"), ("bench-b", b"grant")], 10, source)
        found = await load.measure(("relay",), source, target)
    await producer.stop()

    assert found.per_s > 0
    assert found.per_core > 0
    assert len(found.waits_ms) == 750 * 10 // 10
    assert min(found.waits_ms) >= 0


@pytest.mark.kafka
async def test_placement_and_the_early_refusal_have_reports_to_read(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition has a worker, what is written there is soon told to be finished, and none is left afterwards."""
    monkeypatch.setattr("bench.reports.EVERY_S", 0.1)
    served, partitions = (f"bench-{secrets.token_hex(4)}", "1", INTERACTIVE), 5
    topic = work_topic(*served)
    await ensure(kafka, [TopicSpec(topic, partitions, "tenant", HOUR_MS)])
    producer, directory = EventProducer(kafka, "bench"), WorkerDirectory(kafka)
    await producer.start()
    await directory.start()

    def committed() -> dict[int, int]:
        workers = directory.serving(*served[:2])
        return {held.partition: held.committed for worker in workers for held in worker.report.partitions}

    async with reported(kafka, producer, served, slots=8):
        await (await producer.send_raw(topic, b"work", b"tenant", 3))
        assert await directory.until(lambda: committed() == {0: 0, 1: 0, 2: 0, 3: 1, 4: 0}, WAIT_S)
        workers = directory.serving(*served[:2])
        now_ms = max(worker.seen_ms for worker in workers)
        assert place("request", topic, partitions, workers, {}, now_ms).detail.startswith("worker reported-")
        seen = outlook(topic, workers, {(topic, number): 100 for number in range(partitions)}, now_ms, None)
        assert seen.ready == COUNT
        assert seen.wait_ms, "it is predicted"
    assert await directory.until(lambda: not directory.serving(*served[:2]), WAIT_S)
    await directory.stop()
    await producer.stop()


@pytest.mark.kafka
async def test_requests_that_do_not_come_through_end_the_run(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.admission.STALL_S", 0.5)
    source, target = (f"bench-{name}-{secrets.token_hex(4)}" for name in ("from", "to"))
    await ensure(kafka, [TopicSpec(name, 2, "tenant", HOUR_MS) for name in (source, target)])
    producer = EventProducer(kafka, "bench")
    await producer.start()
    load = Redirected(SimpleNamespace(kafka=kafka), producer, [("bench-a", b"grant")], 100, source)
    with pytest.raises(HeadraceError, match="only 0 of 3 requests came to"):
        await load._send(3, target)
    await producer.stop()


class Redirected(Load):
    """Writes to a topic of its own: other tests read `requests.*`."""

    def __init__(self, stack: Any, producer: EventProducer, grants: Any, share: int, source: str) -> None:
        super().__init__(stack, producer, grants, share)
        self._source = source

    async def _one(self, number: int) -> None:
        send = self._producer.send

        async def redirected(_topic: str, *given: Any, **more: Any) -> Any:
            return await send(self._source, *given, **more)

        self._producer.send = redirected  # type: ignore[method-assign,assignment]
        try:
            await super()._one(number)
        finally:
            self._producer.send = send  # type: ignore[method-assign]


async def test_what_a_request_costs_in_each_step_is_read_of_the_process() -> None:
    step, unused = secrets.token_hex(4), secrets.token_hex(4)
    metrics.of(metrics.ADMISSION_SECONDS, unused)
    for seconds in (40e-6, 60e-6):
        metrics.of(metrics.ADMISSION_SECONDS, step).observe(seconds)
    port = free_port()
    async with OpsServer(port, lambda: None):
        found = await _steps_us(f"http://127.0.0.1:{port}/metrics")
    assert found[step] == pytest.approx(50)
    assert unused not in found
