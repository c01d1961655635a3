"""Kafka clients with the settings that every process shares. Call these inside a running event loop."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.helpers import create_ssl_context

from infra.foreign_names import pass_over_foreign_names
from infra.pacing import pace_failed_updates
from infra.settings import KafkaSettings, SettingsError
from schemas.topics import RECORD_MAX_BYTES

FETCH_BYTES_MAX = 4 * 1024 * 1024  # a partition's share of one fetch
METADATA_AGE_MS = 30_000
SESSION_TIMEOUT_MS = 10_000
HEARTBEAT_INTERVAL_MS = 2_000
SIGN_IN_WAIT_MS = 5_000
PARTITIONS_WAIT_S = 5.0

_REFUSED = (AuthenticationFailedError, SaslAuthenticationFailed, UnsupportedSaslMechanismError)

pass_over_foreign_names()
pace_failed_updates()


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
    if (context := tls_context(settings)) is not None:
        arguments["ssl_context"] = context
    return arguments


def tls_context(settings: KafkaSettings) -> ssl.SSLContext | None:
    """Whom to trust and how to show who we are; None without TLS. Raises SettingsError that names the file at fault."""
    if not settings.security_protocol.endswith("SSL"):
        return None
    files = {"CAFILE": settings.ssl_cafile, "CERTFILE": settings.ssl_certfile, "KEYFILE": settings.ssl_keyfile}
    for name, path in files.items():
        if path is not None and not os.access(path, os.R_OK):
            raise SettingsError(f"HEADRACE_KAFKA_{name}: {path} can't be read")
    try:
        context: ssl.SSLContext = create_ssl_context(
            cafile=settings.ssl_cafile,
            certfile=settings.ssl_certfile,
            keyfile=settings.ssl_keyfile,
            password="",  # with none at all, OpenSSL asks the terminal for an encrypted key's
        )
    except OSError as error:
        named = ", ".join(f"HEADRACE_KAFKA_{name}" for name, path in files.items() if path is not None)
        raise SettingsError(f"{named}: no usable PEM certificate or key: {_tls_words(error)}") from error
    return context


async def unreachable(settings: KafkaSettings, error: BaseException) -> str:
    """What a person should know when a client can't start. aiokafka's own error hides a refused sign-in or certificate."""
    why = await refusal(settings)
    if why is not None:
        return f"Kafka at {settings.bootstrap} {why}"
    return f"Kafka at {settings.bootstrap} can't be reached: {error}"


async def refusal(settings: KafkaSettings) -> str | None:
    """Why a cluster that answers doesn't let this process in; None if it does, or doesn't answer. Never tells the password."""
    arguments = connection(settings)
    why: str | None = None
    for host, port, _family in collect_hosts(arguments.pop("bootstrap_servers"), randomize=False):
        try:
            connected = await create_conn(host, port, request_timeout_ms=SIGN_IN_WAIT_MS, **arguments)
        except ssl.SSLCertVerificationError as error:
            why = f"shows a certificate that HEADRACE_KAFKA_CAFILE doesn't vouch for: {error.verify_message}"
        except ssl.SSLError as error:
            why = f"fails to speak TLS: {_tls_words(error)}"
        except _REFUSED as error:
            why = f"refused {settings.sasl_username!r} by {settings.sasl_mechanism}: {error}"
        except KafkaError:
            why = f"answers, but not in {settings.security_protocol}: see HEADRACE_KAFKA_SECURITY"
        except (OSError, TimeoutError):
            continue
        else:
            connected.close()
            return None
    return why


def _tls_words(error: OSError) -> str:
    """OpenSSL's reason without the place in its source."""
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or str(error)).replace("_", " ").lower()


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
    settings: KafkaSettings, *topics: str, group: str | None = None, **overrides: Any
) -> AIOKafkaConsumer:
    """A consumer from the earliest offset that commits only when told. Topics must exist: aiokafka asks for a missing one without end."""
    arguments = connection(settings) | {
        "group_id": group,
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "max_partition_fetch_bytes": FETCH_BYTES_MAX,
        "metadata_max_age_ms": METADATA_AGE_MS,
        "session_timeout_ms": SESSION_TIMEOUT_MS,
        "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
    }
    return AIOKafkaConsumer(*topics, **(arguments | overrides))


def make_admin(settings: KafkaSettings, **overrides: Any) -> AIOKafkaAdminClient:
    """An admin client; `start()` and `close()` it."""
    return AIOKafkaAdminClient(**(connection(settings) | overrides))


async def partitions_of(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    """The partitions of a topic that a started consumer hasn't subscribed to, sorted; empty if there is no such topic.

    Raises KafkaConnectionError if the cluster doesn't say so for `PARTITIONS_WAIT_S`: one that was away knows no brokers for a moment.
    """
    found = consumer.partitions_for_topic(topic)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + PARTITIONS_WAIT_S
    while not found:  # it only knows what it was subscribed to when it last looked
        answered = await consumer._client.force_metadata_update()  # noqa: SLF001 - aiokafka has no public way
        found = consumer.partitions_for_topic(topic)
        if answered:
            break
        if loop.time() > until_s:
            raise KafkaConnectionError(f"no broker says what partitions {topic} has")
    return sorted(found or ())
