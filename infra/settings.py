"""What each process can be told through its environment.

One frozen class a process, each with `from_env()`. A field's variable is its name in capitals after `HEADRACE_` and,
except for the fields that all processes share, the process: `BridgeSettings.keepalive_ms` is
`HEADRACE_BRIDGE_KEEPALIVE_MS`. Shared: `HEADRACE_KAFKA*`, `HEADRACE_OBJECTS*`, `HEADRACE_DATA`, `HEADRACE_OPS_PORT`,
`HEADRACE_GRANT_SECRET`, and `HEADRACE_OPS_HOST` and `HEADRACE_LOG_LEVEL`, which are read where they are used. An empty variable counts as absent. Raises `SettingsError` that names the variable.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import socket
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import DAY_MS, HOUR_MS, INTERACTIVE, REQUEST_MAX_BYTES, TIERS

SECRET_BYTES = 32
SECRET_BYTES_MIN = 32  # RFC 7518 §3.2: no shorter than the hash that HS256 uses
BOOTSTRAP_MAX = 32
DEFAULT_BOOTSTRAP = "127.0.0.1:9092"

Environment = Mapping[str, str]

_SECURITY = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class SettingsError(HeadraceError):
    """A variable holds what can't be used. The message names it and what is accepted, never a secret's value."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INVALID_REQUEST, message)


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Where the cluster is and how to sign in. `bootstrap` is `host:port`, several parted by commas."""

    bootstrap: str = DEFAULT_BOOTSTRAP
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    @classmethod
    def from_env(cls, env: Environment = os.environ) -> Self:
        """Read `HEADRACE_KAFKA` and `HEADRACE_KAFKA_{SECURITY,SASL_MECHANISM,USERNAME,PASSWORD,CAFILE,CERTFILE,KEYFILE}`.

        A user name without a protocol means SASL over TLS; a CA or certificate file without one means TLS.
        """

        def get(name: str) -> str | None:
            return env.get(f"HEADRACE_KAFKA_{name}") or None

        username, password = get("USERNAME"), get("PASSWORD")
        files = (get("CAFILE"), get("CERTFILE"), get("KEYFILE"))
        security = (get("SECURITY") or _guess_security(username, files)).upper()
        mechanism = (get("SASL_MECHANISM") or "PLAIN").upper()
        if security not in _SECURITY:
            raise SettingsError(f"HEADRACE_KAFKA_SECURITY is {security!r}; it takes {', '.join(_SECURITY)}")
        if mechanism not in _MECHANISMS:
            raise SettingsError(f"HEADRACE_KAFKA_SASL_MECHANISM is {mechanism!r}; it takes {', '.join(_MECHANISMS)}")
        _check_way_in(security, username, password, files)
        return cls(
            bootstrap=_bootstrap(env.get("HEADRACE_KAFKA") or DEFAULT_BOOTSTRAP),
            security_protocol=security,
            sasl_mechanism=mechanism,
            sasl_username=username,
            sasl_password=password,
            ssl_cafile=files[0],
            ssl_certfile=files[1],
            ssl_keyfile=files[2],
        )

    def to_env(self) -> dict[str, str]:
        """The variables that make a child process's `from_env()` return an equal value."""
        named = {
            "HEADRACE_KAFKA": self.bootstrap,
            "HEADRACE_KAFKA_SECURITY": self.security_protocol,
            "HEADRACE_KAFKA_SASL_MECHANISM": self.sasl_mechanism,
            "HEADRACE_KAFKA_USERNAME": self.sasl_username,
            "HEADRACE_KAFKA_PASSWORD": self.sasl_password,
            "HEADRACE_KAFKA_CAFILE": self.ssl_cafile,
            "HEADRACE_KAFKA_CERTFILE": self.ssl_certfile,
            "HEADRACE_KAFKA_KEYFILE": self.ssl_keyfile,
        }
        return {name: value for name, value in named.items() if value is not None}


def _guess_security(username: str | None, files: tuple[str | None, ...]) -> str:
    if username:
        return "SASL_SSL"
    return "SSL" if any(files) else "PLAINTEXT"


def _check_way_in(security: str, username: str | None, password: str | None, files: tuple[str | None, ...]) -> None:
    """What is needed must be there, and what is given must be used: a CA file is no help to a password sent in the clear."""
    cafile, certfile, keyfile = files
    if security.startswith("SASL") and not (username and password):
        raise SettingsError(f"{security} needs HEADRACE_KAFKA_USERNAME and HEADRACE_KAFKA_PASSWORD")
    if not security.startswith("SASL") and (username or password):
        raise SettingsError(
            f"HEADRACE_KAFKA_SECURITY is {security}, which takes no HEADRACE_KAFKA_USERNAME or _PASSWORD"
        )
    if not security.endswith("SSL") and (cafile or certfile or keyfile):
        raise SettingsError(f"HEADRACE_KAFKA_SECURITY is {security}, which takes no certificate or key files")
    if keyfile and not certfile:
        raise SettingsError("HEADRACE_KAFKA_KEYFILE needs HEADRACE_KAFKA_CERTFILE")


def _bootstrap(value: str) -> str:
    """`kafka://a:1,b` or `a:1,b` as `a:1,b:9092`."""
    servers = []
    for server in value.strip().removeprefix("kafka://").rstrip("/").split(",")[:BOOTSTRAP_MAX]:
        address = server.strip().removeprefix("kafka://")
        host, _, port = (address if ":" in address else f"{address}:9092").rpartition(":")
        if not host or "/" in host or "@" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingsError("HEADRACE_KAFKA takes host:port or kafka://host:port, several parted by commas")
        servers.append(f"{host}:{port}")
    return ",".join(servers)


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """Where the object store is: a folder (`path`, no bucket), or a bucket, the prefix of its keys, and the server's address if it isn't AWS's."""

    path: str
    bucket: str | None = None
    endpoint: str | None = None

    @classmethod
    def from_env(cls, env: Environment = os.environ) -> Self | None:
        """Read `HEADRACE_OBJECTS` (`file:///folder` or `s3://bucket/prefix`) and `HEADRACE_OBJECTS_ENDPOINT`; None where neither is set."""
        url, endpoint = env.get("HEADRACE_OBJECTS"), env.get("HEADRACE_OBJECTS_ENDPOINT") or None
        if not url:
            if endpoint:
                raise SettingsError("HEADRACE_OBJECTS_ENDPOINT needs a bucket: HEADRACE_OBJECTS=s3://bucket/prefix")
            return None
        if url.startswith("file:///"):
            if endpoint:
                raise SettingsError("HEADRACE_OBJECTS is a folder, which has no HEADRACE_OBJECTS_ENDPOINT")
            return cls(url.removeprefix("file://"))
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not url.startswith("s3://") or not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix.rstrip("/")):
            raise SettingsError(
                "HEADRACE_OBJECTS takes file:///folder or s3://bucket/prefix, with a whole path or a bucket's name"
            )
        if endpoint and ("@" in endpoint or not endpoint.startswith(("http://", "https://"))):
            raise SettingsError(
                "HEADRACE_OBJECTS_ENDPOINT takes an address that starts with http:// or https://, without credentials"
            )
        return cls(prefix.rstrip("/"), bucket, endpoint)


_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"|[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


def grant_secret(data_dir: Path, env: Environment = os.environ) -> bytes:
    """The key that signs grants: `HEADRACE_GRANT_SECRET`, else the file `<data_dir>/secrets/grant`.

    The file is made on first need, readable by its owner alone; processes that start at once agree on one.
    """
    given = env.get("HEADRACE_GRANT_SECRET")
    if given:
        if len(given.encode()) < SECRET_BYTES_MIN:
            raise SettingsError(f"HEADRACE_GRANT_SECRET needs at least {SECRET_BYTES_MIN} bytes")
        return given.encode()
    path = data_dir / "secrets" / "grant"
    if not path.exists():
        _create_secret(path)
    secret = path.read_bytes().strip()
    if len(secret) < SECRET_BYTES_MIN:
        raise SettingsError(f"{path} holds less than {SECRET_BYTES_MIN} bytes: remove it to have a new one made")
    return secret


def _create_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode())
        os.link(name, path)  # fails if another process was first: then its secret counts
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()


_SHARED = {"data_dir": "HEADRACE_DATA", "ops_port": "HEADRACE_OPS_PORT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What every process has. `ops_port` serves /metrics, /livez and /readyz; 0 is none. `objects` None is the folder `objects` in `data_dir`."""

    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    objects: ObjectSettings | None = None
    data_dir: Path = Path(".headrace")
    ops_port: int = 0

    @classmethod
    def from_env(cls, env: Environment = os.environ) -> Self:
        """Read every field's variable; `SettingsError` names the first that can't be used."""
        prefix = f"HEADRACE_{cls.__name__.removesuffix('Settings').upper()}_"
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {"kafka": KafkaSettings.from_env(env), "objects": ObjectSettings.from_env(env)}
        for item in dataclasses.fields(cls):
            name = _SHARED.get(item.name, prefix + item.name.upper())
            raw = env.get(name)
            if raw and item.name not in ("kafka", "objects", "grant_secret"):
                values[item.name] = _convert(name, raw, hints[item.name])
        if "grant_secret" in hints:
            values["grant_secret"] = grant_secret(values.get("data_dir", Path(".headrace")), env)
        return cls(**values)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 0:
                raise SettingsError(f"{item.name} is {value}: it can't be negative")


def _convert(name: str, raw: str, kind: Any) -> Any:
    try:
        if kind is bool:
            if raw.lower() in _TRUE + _FALSE:
                return raw.lower() in _TRUE
            raise ValueError(raw)
        if typing.get_origin(kind) is tuple:
            return tuple(part.strip() for part in raw.split(",") if part.strip())
        return kind(raw)
    except ValueError as error:
        raise SettingsError(f"{name} is {raw!r}; it takes {getattr(kind, '__name__', kind)}") from error


def _process_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings(ProcessSettings):
    """`headrace streams admission`: one app a tier."""

    tier: str = INTERACTIVE
    grant_secret: bytes = field(default=b"", repr=False)
    tokenise_threads: int = 2
    request_bytes_max: int = REQUEST_MAX_BYTES
    worker_stale_ms: int = 10_000  # a worker that has not reported for so long takes no new work
    cache_url: str = field(
        default="memory://", repr=False
    )  # the response cache: memory://, or redis:// with its password
    session_timeout_ms: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingsSettings(ProcessSettings):
    """`headrace streams endings`: folds `tokens`, alone writes endings."""

    poll_records_max: int = 2_000
    commit_interval_ms: int = 500
    open_requests_max: int = 100_000
    remember_ms: int = 2 * HOUR_MS  # closed requests are remembered this long, as long as `tokens` keeps them
    hard_limit_ms: int = 2 * HOUR_MS  # a request that is open for so long is forgotten, without an ending
    session_timeout_ms: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSettings(ProcessSettings):
    """`headrace streams lifecycle`: keeps deadlines and time limits, and removes payloads that no record refers to any more."""

    commit_interval_ms: int = 1_000
    session_timeout_ms: int = 10_000
    sweep_interval_ms: int = HOUR_MS
    payload_retention_ms: int = 8 * DAY_MS  # a day more than requests and answers are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    """`headrace worker MODEL VERSION`."""

    tiers: tuple[str, ...] = TIERS  # of these it serves what its version has
    worker_id: str = field(default_factory=_process_id)
    slots: int = 0  # 0: what the model's configuration says
    window_records: int = 64  # the same for all workers of a version: it bounds what a former owner may have started
    window_bytes: int = 64 * 1024 * 1024
    report_interval_ms: int = 1_000
    commit_interval_ms: int = 200
    session_timeout_ms: int = 10_000
    drain_ms: int = 10_000
    start_up_max_ms: int = 600_000
    chunk_linger_ms: int = 0
    poison_attempts_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(ProcessSettings):
    """`headrace bridge`: the front door."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 0  # 0: no gRPC
    grant_secret: bytes = field(default=b"", repr=False)
    instance: str = field(default_factory=_process_id)
    body_bytes_max: int = REQUEST_MAX_BYTES
    grant_ttl_ms: int = 300_000
    deadline_default_ms: int = 60_000  # for a model that the bridge doesn't know; else the model's default_timeout_ms
    keepalive_ms: int = 15_000
    reader_pending_bytes_max: int = 1024 * 1024  # text that a slow reader has not taken
    reader_stall_ms: int = 30_000
    socket_requests_max: int = 64
    open_requests_max: int = 10_000
    worker_stale_ms: int = 10_000  # a worker that has not reported for so long makes no model ready
    drain_ms: int = 10_000
    cors_origins: tuple[str, ...] = ()
