"""Topics are made as specified, corrected, and refused where a correction would move keys."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import NodeNotReadyError

from infra import topics as topics_module
from infra.kafka import make_admin
from infra.settings import KafkaSettings
from infra.topics import ensure, ensure_core, ensure_model, ensure_tenant, partition_counts, topic_config
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import DAY_MS, HOUR_MS, TOKENS, TopicSpec, core_topics


def spec(partitions: int = 2, **fields) -> TopicSpec:
    return TopicSpec(f"test-{uuid.uuid4().hex[:8]}", partitions, "id", **fields)


async def test_a_missing_topic_is_created_and_then_left_alone(kafka: KafkaSettings):
    one, other = spec(retention_ms=HOUR_MS), spec(compacted=True)

    first = await ensure(kafka, [one, other])
    second = await ensure(kafka, [one, other])

    assert [(report.name, report.action) for report in first] == [(one.name, "created"), (other.name, "created")]
    assert [(report.action, report.changes) for report in second] == [("unchanged", ()), ("unchanged", ())]


async def test_settings_that_differ_are_corrected_and_others_are_kept(kafka: KafkaSettings):
    before = spec(retention_ms=HOUR_MS, config={"min.insync.replicas": "1", "flush.messages": "1000"})
    await ensure(kafka, [before])

    after = TopicSpec(before.name, 2, "id", retention_ms=DAY_MS)
    [report] = await ensure(kafka, [after])
    [settled] = await ensure(
        kafka, [TopicSpec(before.name, 2, "id", retention_ms=DAY_MS, config={"flush.messages": "1000"})]
    )

    assert report.action == "corrected"
    assert f"retention.ms: {HOUR_MS} → {DAY_MS}" in report.changes
    assert settled.action == "unchanged"


@pytest.mark.parametrize("partitions", [1, 3])
async def test_another_partition_count_is_refused_by_name(kafka: KafkaSettings, partitions: int):
    before, new = spec(2), spec(1)
    await ensure(kafka, [before])

    with pytest.raises(HeadraceError, match=f"{before.name} has 2 partitions, not {partitions}") as caught:
        await ensure(kafka, [TopicSpec(before.name, partitions, "id"), new])

    assert caught.value.reason is Reason.CONFLICT
    assert (await partition_counts(kafka))[new.name] == 1


async def test_a_topic_that_may_grow_grows(kafka: KafkaSettings):
    before = spec(1)
    await ensure(kafka, [before])

    [report] = await ensure(kafka, [TopicSpec(before.name, 3, "id")], grow=True)

    assert (report.action, report.partitions) == ("grown", 3)
    assert (await partition_counts(kafka))[before.name] == 3


async def test_too_few_replicas_stay_and_are_told(kafka: KafkaSettings):
    before = spec(2)
    await ensure(kafka, [before])

    [report] = await ensure(kafka, [before], replication=3)
    [content] = await ensure(kafka, [before])

    assert (report.action, report.changes) == ("unchanged", ())
    assert report.left == ("it has 1 replica, not 3: this command can't change that, kafka-reassign-partitions.sh can",)
    assert content.left == ()


async def test_the_core_a_model_and_a_tenant_get_their_topics(kafka: KafkaSettings):
    version = ModelVersionRegistered(f"m.{uuid.uuid4().hex[:6]}", "1", "scripted", "", 100, partitions=2)

    core = await ensure_core(kafka)
    work = await ensure_model(kafka, version)
    [tenant] = await ensure_tenant(kafka, "t" + uuid.uuid4().hex[:6])

    assert {report.action for report in core} == {"unchanged"}
    assert {report.name for report in core} == {item.name for item in core_topics()}
    assert [report.name for report in work] == [f"work.{version.model}.1.interactive", f"work.{version.model}.1.batch"]
    assert {report.partitions for report in work} == {2}
    assert tenant.name.startswith("tokens.t")


async def test_the_core_is_refused_other_partition_counts_than_it_has(kafka: KafkaSettings):
    with pytest.raises(HeadraceError, match=r"^tokens has 8 partitions, not 9\. ") as caught:
        await ensure_core(kafka, {"tokens": 9})
    assert caught.value.reason is Reason.CONFLICT


async def test_a_broker_that_does_not_know_itself_yet_is_asked_again(kafka: KafkaSettings, monkeypatch):
    """One that has just started may tell of no broker at all, and a client that heard that never asks again."""
    opened: list[AIOKafkaAdminClient] = []

    class Unaware(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka has no types
        async def describe_topics(self, *_: Any) -> Any:
            raise NodeNotReadyError("node id None")

    def client(settings: KafkaSettings) -> AIOKafkaAdminClient:
        made = Unaware(bootstrap_servers=settings.bootstrap) if not opened else make_admin(settings)
        opened.append(made)
        return made

    monkeypatch.setattr(topics_module, "make_admin", client)
    (report,) = await ensure(kafka, [spec()])
    assert (report.action, len(opened)) == ("created", 2)


async def test_a_cluster_that_is_not_there_is_a_retriable_error():
    with pytest.raises(HeadraceError, match=r"127\.0\.0\.1:1 ") as caught:
        await ensure(KafkaSettings("127.0.0.1:1"), core_topics())
    assert caught.value.retriable


def test_retention_reaches_records_of_a_busy_topic():
    tokens = next(item for item in core_topics() if item.name == TOKENS)
    config = topic_config(tokens)
    assert config["message.timestamp.type"] == "LogAppendTime"
    assert int(config["segment.ms"]) < int(config["retention.ms"])
    assert topic_config(TopicSpec("x", 1, "id"))["retention.ms"] == "-1"
