"""Kafka clients with the settings that every process shares. Call these inside a running event loop."""

from __future__ import annotations

import asyncio
import math
import os
import random
import ssl
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
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
from aiokafka.partitioner import murmur2
from aiokafka.structs import RecordMetadata

from infra.foreign_names import pass_over_foreign_names
from infra.gathering import Gathering
from infra.pacing import close_at_once, pace_failed_updates
from infra.settings import KafkaSettings, SettingsError
from infra.sharing import MISSING_LOOK_S, MISSING_WAIT_S, share_forgotten_topics
from schemas.topics import RECORD_MAX_BYTES

FETCH_BYTES_MAX = 4 * 1024 * 1024  # a partition's share of one fetch
KEYS_HASHED_MAX = 4_096
METADATA_AGE_MS = 30_000
SILENT_AFTER_S = 2.0
SILENT_WAIT_MS = 1_000
"""What is asked next on the same connection waits behind a fetch: a rebalance, too."""
GROUPED_WAIT_MS, GROUPED_BYTES = 2, 64 * 1024
"""So long the broker gathers records that come fast, or so many bytes of them: 8 ms saved another tenth of admission's work, and made every request wait
three times as long there;"""
GROUPED_MIN = 1.0
"""of which there must be so many in that time, on the average of `RATE_OVER_S`."""
RATE_OVER_S = 0.5
SESSION_TIMEOUT_MS = 10_000
HEARTBEAT_INTERVAL_MS = 2_000
SIGN_IN_WAIT_MS = 5_000
PARTITIONS_WAIT_S = 5.0

_REFUSED = (AuthenticationFailedError, SaslAuthenticationFailed, UnsupportedSaslMechanismError)

pass_over_foreign_names()
pace_failed_updates()
close_at_once()
share_forgotten_topics()


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


class Producer(AIOKafkaProducer):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's, which looks a topic up three times for each record; `put` is for who knows that the partition is there."""

    def gather(self) -> None:
        """Wait a moment for more records while they come in groups. To be called before anything is sent."""
        self._message_accumulator.__class__ = Gathering

    async def put(
        self, place: TopicPartition, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes]]
    ) -> asyncio.Future[RecordMetadata]:
        """`send` to a partition that `client.cluster` has, outside a transaction. Raises as `send`."""
        self._serialize(key, value, headers)  # which refuses what is too large
        wait_s = self._request_timeout_ms / 1000
        put: asyncio.Future[RecordMetadata]
        put = await self._message_accumulator.add_message(place, key, value, wait_s, headers=headers)
        return put


def make_producer(settings: KafkaSettings, **overrides: Any) -> Producer:
    """An idempotent producer that waits for no batch to fill; records up to `RECORD_MAX_BYTES`."""
    arguments = connection(settings) | {
        "enable_idempotence": True,
        "acks": "all",
        "linger_ms": 0,
        "partitioner": partition_for,
        "max_request_size": RECORD_MAX_BYTES,
        "metadata_max_age_ms": METADATA_AGE_MS,
    }
    return Producer(**(arguments | overrides))


def partition_for(key: bytes | None, every: Sequence[int], available: Sequence[int]) -> int:
    """A record's partition, as Java's and aiokafka's clients choose it: by its key, or any that can be written now."""
    if key is None:
        return random.choice(available or every)
    return every[_hashed(key) % len(every)]


@lru_cache(KEYS_HASHED_MAX)
def _hashed(key: bytes) -> int:
    """Most records are keyed by their tenant, and hashing a key in Python takes as long as to put a record into its batch."""
    found: int = murmur2(key)
    return found & 0x7FFF_FFFF


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


async def cluster_of(settings: KafkaSettings) -> str:
    """The cluster's own id; "" if its brokers don't tell. Raises KafkaError."""
    admin = make_admin(settings)
    try:
        await admin.start()
        return str((await admin.describe_cluster()).get("cluster_id") or "")
    finally:
        await admin.close()


async def partitions_of(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    """The partitions of a topic that a started consumer hasn't subscribed to, sorted; empty if there is no such topic.

    A broker that has just started answers before it has read of all its topics: one that it doesn't name is asked for again, for `MISSING_WAIT_S`,
    before it is believed to be missing. Raises KafkaConnectionError if the cluster doesn't answer for `PARTITIONS_WAIT_S`: one that was away
    knows no brokers for a moment.
    """
    found = consumer.partitions_for_topic(topic)
    loop = asyncio.get_running_loop()
    until_s, missing_until_s = loop.time() + PARTITIONS_WAIT_S, math.inf
    while not found:  # it only knows what it was subscribed to when it last looked
        answered = await consumer._client.force_metadata_update()  # noqa: SLF001 - aiokafka has no public way
        if found := consumer.partitions_for_topic(topic):
            break
        if answered:
            missing_until_s = min(missing_until_s, loop.time() + MISSING_WAIT_S)
            if loop.time() >= missing_until_s:
                break
            await asyncio.sleep(MISSING_LOOK_S)
        elif loop.time() > until_s:
            raise KafkaConnectionError(f"no broker says what partitions {topic} has")
    return sorted(found or ())


class Batching:
    """How a consumer fetches that many records come to, and nobody waits for one alone.

    While records come, the broker gathers them: so many bytes, or so long at most. In silence it holds a fetch longer and answers at the first
    record: an idle process then asks a few times less, and hears sooner.
    """

    def __init__(self, wait_ms: int, bytes_min: int) -> None:
        """How long the broker may gather records, and how many bytes are enough."""
        self._busy = wait_ms, bytes_min
        self._heard_s = 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """For `make_consumer`."""
        wait_ms, bytes_min = self._busy
        return {"fetch_max_wait_ms": wait_ms, "fetch_min_bytes": bytes_min}

    def heard(self, consumer: AIOKafkaConsumer, anything: bool) -> None:
        """To be told after each reading whether it brought anything."""
        now_s = time.monotonic()
        if anything:
            self._heard_s = now_s
        silent = now_s - self._heard_s > SILENT_AFTER_S
        fetch_within(consumer, *((SILENT_WAIT_MS, 1) if silent else self._busy))


class GroupedFetch:
    """How a consumer fetches whose records are waited for: each at once, unless they come so fast that a moment brings several.

    Each fetch costs client and broker as much as a record or two. By `GROUPED_WAIT_MS` more of waiting a few records share one.
    """

    def __init__(self, wait_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`wait_ms`: how long the broker may hold a fetch that finds nothing, when each record is fetched at once."""
        self._single = wait_ms, 1
        self._clock = clock
        self._count = 0
        self._counted_s = clock()

    def heard(self, consumer: AIOKafkaConsumer, records: int) -> None:
        """To be told after each reading how many records it brought."""
        self._count += records
        seconds = self._clock() - self._counted_s
        if seconds < RATE_OVER_S:
            return
        grouped = self._count / seconds * GROUPED_WAIT_MS / 1000 >= GROUPED_MIN
        self._count, self._counted_s = 0, self._clock()
        fetch_within(consumer, *((GROUPED_WAIT_MS, GROUPED_BYTES) if grouped else self._single))


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stop a consumer for good. aiokafka's own `stop` ends as cancelled, with its connections open, when a fetch waits to be tried again."""
    stopping = asyncio.ensure_future(consumer.stop())
    await asyncio.wait({stopping})
    if stopping.cancelled():
        await consumer._client.close()  # noqa: SLF001
    else:
        stopping.result()


def fetch_within(consumer: AIOKafkaConsumer, wait_ms: int, bytes_min: int = 1) -> None:
    """From its next fetch on, how long the broker may hold one that finds fewer bytes. What else is asked on that connection waits behind it."""
    fetcher: Any = consumer._fetcher  # noqa: SLF001  # aiokafka takes these for good
    if fetcher is not None:
        fetcher._fetch_max_wait_ms, fetcher._fetch_min_bytes = wait_ms, bytes_min  # noqa: SLF001
