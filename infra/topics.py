"""Makes the cluster's topics match their specifications: creates, corrects settings, refuses what would break keys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, NodeNotReadyError, TopicAlreadyExistsError, for_code

from infra.kafka import make_admin
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    RECORD_MAX_BYTES,
    REGISTRY,
    PartitionCounts,
    TopicSpec,
    core_topics,
    model_topics,
    tenant_topic,
)

SEGMENTS_PER_RETENTION = 8
SEGMENT_MIN_MS = 10 * MINUTE_MS
SEGMENT_MAX_MS = 7 * DAY_MS
VISIBLE_WAIT_S = 15.0
BEGIN_WAIT_S, BEGIN_LOOK_S = 5.0, 0.2
POLL_S = 0.05
CREATED_AT_ONCE = 50
"""Topics that one request makes: brokers take a while for each."""
_DYNAMIC_TOPIC_CONFIG = 1  # Kafka protocol, DescribeConfigs: the topic's own settings


@dataclass(frozen=True, slots=True)
class TopicReport:
    """What was done to one topic: `created`, `corrected`, `grown` or `unchanged`, in which respects, and what was left as it is."""

    name: str
    action: str
    partitions: int
    changes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def topic_config(spec: TopicSpec) -> dict[str, str]:
    """A topic's settings in Kafka's words. Segments are short enough that retention and compaction reach old records."""
    retention_ms = -1 if spec.retention_ms is None else spec.retention_ms
    segment_ms = HOUR_MS if spec.compacted else SEGMENT_MAX_MS
    if spec.retention_ms is not None:
        segment_ms = min(max(spec.retention_ms // SEGMENTS_PER_RETENTION, SEGMENT_MIN_MS), SEGMENT_MAX_MS)
    return {
        "cleanup.policy": "compact" if spec.compacted else "delete",
        "retention.ms": str(retention_ms),
        "segment.ms": str(segment_ms),
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(RECORD_MAX_BYTES),
    } | spec.config


async def ensure(
    settings: KafkaSettings, specs: Iterable[TopicSpec], replication: int | None = 1, *, grow: bool = False
) -> list[TopicReport]:
    """Create the topics that are missing, correct the settings of the others, and return when all have leaders.

    A partition count that differs is an error, since it decides where keys go: HeadraceError (conflict) lists all of
    them, once everything else is done. With `grow`, too few become enough. Fewer replicas than `replication` stay as they
    are, and the report says so; None makes as many as the topics have that exist whatever is served. Other failures are HeadraceError too (unavailable, permission_denied, invalid_request).
    """
    wanted = {spec.name: spec for spec in specs}
    async with _cluster(settings) as (admin, there):
        if replication is None:
            replication = (await _replicas(admin)).get(REGISTRY, 1)
        reports = await _create(admin, [spec for name, spec in wanted.items() if name not in there], replication)
        found = [name for name in wanted if name not in {report.name for report in reports}]
        existing = await _await_visible(admin, set(wanted))
        reports += await _correct(admin, [wanted[name] for name in found], existing, grow=grow)
        if replication > 1 and found:
            fewest = await _replicas(admin)
            reports = [_with_replicas(report, fewest.get(report.name, replication), replication) for report in reports]
    _refuse_mismatches(wanted, existing)
    order = {name: index for index, name in enumerate(wanted)}
    return sorted(reports, key=lambda report: order[report.name])


async def ensure_core(
    settings: KafkaSettings, named: Mapping[str, int] = MappingProxyType({}), replication: int = 1
) -> list[TopicReport]:
    """`ensure` for the topics that exist whatever models are served. `named` has fields of `PartitionCounts`: what it doesn't name is as it is there."""
    counts = PartitionCounts.of(await partition_counts(settings), named)
    return await ensure(settings, core_topics(counts), replication)


async def ensure_model(
    settings: KafkaSettings, version: ModelVersionRegistered, replication: int | None = None
) -> list[TopicReport]:
    """`ensure_models` for one."""
    return await ensure_models(settings, [version], replication)


async def ensure_models(
    settings: KafkaSettings, versions: Iterable[ModelVersionRegistered], replication: int | None = None
) -> list[TopicReport]:
    """`ensure` for model versions' work topics, which may grow: admission chooses their partitions itself."""
    specs = [spec for version in versions for spec in _work_topics(version)]
    return await ensure(settings, specs, replication, grow=True)


def _work_topics(version: ModelVersionRegistered) -> tuple[TopicSpec, ...]:
    kept_ms = max(version.default_timeout_ms, DAY_MS)
    return model_topics(version.model, version.version, version.tiers, version.partitions, kept_ms)


async def ensure_tenant(
    settings: KafkaSettings, tenant: str, partitions: int = 1, replication: int | None = None
) -> list[TopicReport]:
    """`ensure` for the topic that a direct producer reads its answers from."""
    return await ensure(settings, [tenant_topic(tenant, partitions)], replication, grow=True)


async def partition_counts(settings: KafkaSettings) -> dict[str, int]:
    """Every topic of the cluster and its number of partitions."""
    async with _cluster(settings) as (_, existing):
        return existing


@contextlib.asynccontextmanager
async def _cluster(settings: KafkaSettings) -> AsyncIterator[tuple[AIOKafkaAdminClient, dict[str, int]]]:
    """What `_begun` gives, closed afterwards. Raises HeadraceError (unavailable) for what Kafka raises meanwhile."""
    admin = None
    try:
        admin, existing = await _begun(settings)
        yield admin, existing
    except (KafkaError, TimeoutError, OSError) as error:
        raise HeadraceError(
            Reason.UNAVAILABLE,
            f"Kafka at {settings.bootstrap} can't be asked for its topics: {error or type(error).__name__}",
        ) from error
    finally:
        if admin is not None:
            await admin.close()


async def _begun(settings: KafkaSettings) -> tuple[AIOKafkaAdminClient, dict[str, int]]:
    """A client that knows the brokers, and `_partitions`: a broker that has just started tells of none, and that client never asks again."""
    until_s = time.monotonic() + BEGIN_WAIT_S
    while True:
        admin = make_admin(settings)
        try:
            await admin.start()
            return admin, await _partitions(admin)
        except BaseException as error:
            await admin.close()
            if not isinstance(error, NodeNotReadyError) or time.monotonic() > until_s:
                raise
        await asyncio.sleep(BEGIN_LOOK_S)


async def _partitions(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Topics whose partitions all have leaders. Asks for all topics: asking for a missing one may create it."""
    counts = {}
    for topic in await admin.describe_topics():
        leaders = [partition["leader"] >= 0 for partition in topic["partitions"]]
        if not topic["error_code"] and leaders and all(leaders):
            counts[topic["topic"]] = len(leaders)
    return counts


async def _replicas(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Each topic's number of replicas: that of the partition with the fewest."""
    return {
        topic["topic"]: min(len(partition["replicas"]) for partition in topic["partitions"])
        for topic in await admin.describe_topics()
        if topic["partitions"]
    }


def _with_replicas(report: TopicReport, replicas: int, wanted: int) -> TopicReport:
    """The report, which says so if there are too few: replicas are placed by Kafka's own tool, which moves data."""
    if replicas >= wanted:
        return report
    count = "1 replica" if replicas == 1 else f"{replicas} replicas"
    text = f"it has {count}, not {wanted}: this command can't change that, kafka-reassign-partitions.sh can"
    return replace(report, left=(*report.left, text))


async def _await_visible(admin: AIOKafkaAdminClient, names: set[str]) -> dict[str, int]:
    loop = asyncio.get_running_loop()
    limit = loop.time() + VISIBLE_WAIT_S
    while True:
        counts = await _partitions(admin)
        missing = names - counts.keys()
        if not missing:
            return counts
        if loop.time() > limit:
            raise HeadraceError(Reason.UNAVAILABLE, f"these topics have no leader yet: {', '.join(sorted(missing))}")
        await asyncio.sleep(POLL_S)


async def _create(admin: AIOKafkaAdminClient, specs: list[TopicSpec], replication: int) -> list[TopicReport]:
    new = [NewTopic(spec.name, spec.partitions, replication, topic_configs=topic_config(spec)) for spec in specs]
    reports, partitions = [], {spec.name: spec.partitions for spec in specs}
    for start in range(0, len(new), CREATED_AT_ONCE):
        answer = (await admin.create_topics(new[start : start + CREATED_AT_ONCE])).to_object()
        for result in answer["topic_errors"]:
            name, code = result["topic"], result["error_code"]
            if code == 0:
                reports.append(TopicReport(name, "created", partitions[name]))
            elif code != TopicAlreadyExistsError.errno:  # another process was first: then it is checked like the rest
                _refuse(f"the topic {name} can't be created", code, result.get("error_message"))
    return reports


def _refuse(what: str, code: int, message: str | None) -> None:
    kind = for_code(code)
    reason = Reason.UNAVAILABLE if kind.retriable else Reason.INVALID_REQUEST
    if "Authorization" in kind.__name__:
        reason = Reason.PERMISSION_DENIED
    raise HeadraceError(reason, f"{what}: {message or kind.__name__}")


async def _correct(
    admin: AIOKafkaAdminClient, specs: list[TopicSpec], existing: dict[str, int], *, grow: bool
) -> list[TopicReport]:
    """Corrects settings and, with `grow`, partition counts; updates `existing`."""
    if not specs:
        return []
    current = await _configs(admin, [spec.name for spec in specs])
    altered, reports = [], []
    for spec in specs:
        have, own = current[spec.name]
        changes = [
            f"{key}: {have.get(key)} → {value}" for key, value in topic_config(spec).items() if have.get(key) != value
        ]
        if changes:  # AlterConfigs replaces all of a topic's own settings, so they are repeated
            altered.append(ConfigResource(ConfigResourceType.TOPIC, spec.name, own | topic_config(spec)))
        action = "corrected" if changes else "unchanged"
        if grow and existing[spec.name] < spec.partitions:
            await admin.create_partitions({spec.name: NewPartitions(spec.partitions)})
            changes.append(f"partitions: {existing[spec.name]} → {spec.partitions}")
            existing[spec.name] = spec.partitions
            action = "grown"
        reports.append(TopicReport(spec.name, action, existing[spec.name], tuple(changes)))
    if altered:
        for answer in await admin.alter_configs(altered):
            for result in answer.to_object()["resources"]:
                if result["error_code"]:
                    _refuse(
                        f"{result['resource_name']} can't be corrected", result["error_code"], result["error_message"]
                    )
    return reports


async def _configs(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """For each topic: all its settings, and those set on the topic itself."""
    found: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    for answer in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names]):
        for resource in answer.to_object()["resources"]:
            if resource["error_code"]:
                _refuse(f"{resource['resource_name']} can't be read", resource["error_code"], resource["error_message"])
            found[resource["resource_name"]] = _split_entries(resource["config_entries"])
    return found


def _split_entries(entries: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    everything = {entry["config_names"]: entry["config_value"] for entry in entries}
    own = {
        entry["config_names"]: entry["config_value"]
        for entry in entries
        if entry.get("config_source", _DYNAMIC_TOPIC_CONFIG) == _DYNAMIC_TOPIC_CONFIG
    }
    return everything, own


def _refuse_mismatches(wanted: dict[str, TopicSpec], existing: dict[str, int]) -> None:
    wrong = [
        f"{name} has {existing[name]} partitions, not {spec.partitions}"
        for name, spec in wanted.items()
        if existing[name] != spec.partitions
    ]
    if wrong:
        raise HeadraceError(
            Reason.CONFLICT,
            f"{'; '.join(wrong)}. A key's partition depends on the count: name the count that is there, "
            "or drain the topic and create it anew",
        )
