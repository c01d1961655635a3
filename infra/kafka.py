"""Kafka clients with the settings that every process shares. Call these inside a running event loop."""

from __future__ import annotations

from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.helpers import create_ssl_context

from infra.foreign_names import pass_over_foreign_names
from infra.settings import KafkaSettings
from schemas.topics import RECORD_MAX_BYTES

FETCH_BYTES_MAX = 4 * 1024 * 1024  # a partition's share of one fetch
METADATA_AGE_MS = 30_000
PATTERN_METADATA_AGE_MS = 2_000  # a topic that matches a pattern is found this soon
SESSION_TIMEOUT_MS = 10_000
HEARTBEAT_INTERVAL_MS = 2_000

pass_over_foreign_names()


def connection(settings: KafkaSettings) -> dict[str, Any]:
    """The arguments about reaching the cluster that all of aiokafka's clients take."""
    arguments: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap,
        "security_protocol": settings.security_protocol,
    }
    if settings.security_protocol.startswith("SASL"):
        arguments["sasl_mechanism"] = settings.sasl_mechanism
        arguments["sasl_plain_username"] = settings.sasl_username
        arguments["sasl_plain_password"] = settings.sasl_password
    if settings.security_protocol.endswith("SSL"):
        arguments["ssl_context"] = create_ssl_context(
            cafile=settings.ssl_cafile, certfile=settings.ssl_certfile, keyfile=settings.ssl_keyfile
        )
    return arguments


def make_producer(settings: KafkaSettings, **overrides: Any) -> AIOKafkaProducer:
    """An idempotent producer that waits for no batch to fill; records up to `RECORD_MAX_BYTES`."""
    arguments = connection(settings) | {
        "enable_idempotence": True,
        "acks": "all",
        "linger_ms": 0,
        "max_request_size": RECORD_MAX_BYTES,
        "metadata_max_age_ms": METADATA_AGE_MS,
    }
    return AIOKafkaProducer(**(arguments | overrides))


def make_consumer(
    settings: KafkaSettings, *topics: str, group: str | None = None, pattern: str | None = None, **overrides: Any
) -> AIOKafkaConsumer:
    """A consumer from the earliest offset that commits only when told.

    Topics must exist: aiokafka asks for a missing one without end. `pattern` (a regular expression) subscribes to
    topics as they come; a new one is seen within `PATTERN_METADATA_AGE_MS`.
    """
    arguments = connection(settings) | {
        "group_id": group,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "max_partition_fetch_bytes": FETCH_BYTES_MAX,
        "metadata_max_age_ms": METADATA_AGE_MS if pattern is None else PATTERN_METADATA_AGE_MS,
        "session_timeout_ms": SESSION_TIMEOUT_MS,
        "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
    }
    consumer = AIOKafkaConsumer(*topics, **(arguments | overrides))
    if pattern is not None:
        consumer.subscribe(pattern=pattern)
    return consumer


def make_admin(settings: KafkaSettings, **overrides: Any) -> AIOKafkaAdminClient:
    """An admin client; `start()` and `close()` it."""
    return AIOKafkaAdminClient(**(connection(settings) | overrides))


async def partitions_of(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    """The partitions of a topic that a started consumer hasn't subscribed to, sorted; empty if there is no such topic."""
    found = consumer.partitions_for_topic(topic)
    if not found:  # it only knows what it was subscribed to when it last looked
        await consumer._client.force_metadata_update()  # noqa: SLF001 - aiokafka has no public way
        found = consumer.partitions_for_topic(topic)
    return sorted(found or ())
