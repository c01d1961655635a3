"""Settings come from the environment with defaults that work; what can't be used is named, and no secret is shown."""

from __future__ import annotations

import dataclasses
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.settings import (
    AdmissionSettings,
    BridgeSettings,
    EndingsSettings,
    KafkaSettings,
    LifecycleSettings,
    ObjectSettings,
    ProcessSettings,
    SettingsError,
    WorkerSettings,
    grant_secret,
)

ROOT = Path(__file__).resolve().parents[2]
ALL = (AdmissionSettings, BridgeSettings, EndingsSettings, WorkerSettings)


@pytest.mark.parametrize(
    ("value", "bootstrap"),
    [
        ("", "127.0.0.1:9092"),
        ("kafka://a:1", "a:1"),
        ("kafka://a:1/", "a:1"),
        ("a:1, b:2", "a:1,b:2"),
        ("kafka://a,kafka://b:2", "a:9092,b:2"),
        ("[::1]:9", "[::1]:9"),
    ],
)
def test_addresses(value: str, bootstrap: str):
    assert KafkaSettings.from_env({"HEADRACE_KAFKA": value}).bootstrap == bootstrap


@pytest.mark.parametrize("value", ["http://a:1", "a:b", "a:0", "a:70000", ":1", ",", "user:secret@a:1"])
def test_addresses_that_are_none(value: str):
    with pytest.raises(SettingsError, match="HEADRACE_KAFKA") as caught:
        KafkaSettings.from_env({"HEADRACE_KAFKA": value})
    assert "secret" not in str(caught.value)


def test_signing_in():
    env = {
        "HEADRACE_KAFKA_USERNAME": "u",
        "HEADRACE_KAFKA_PASSWORD": "hush",
        "HEADRACE_KAFKA_SASL_MECHANISM": "scram-sha-512",
    }
    settings = KafkaSettings.from_env(env)
    assert (settings.security_protocol, settings.sasl_mechanism) == ("SASL_SSL", "SCRAM-SHA-512")
    assert "hush" not in repr(settings)
    assert KafkaSettings.from_env(settings.to_env()) == settings
    assert KafkaSettings.from_env({"HEADRACE_KAFKA_CAFILE": "ca.pem"}).security_protocol == "SSL"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"HEADRACE_KAFKA_SECURITY": "TLS"}, "HEADRACE_KAFKA_SECURITY"),
        ({"HEADRACE_KAFKA_SASL_MECHANISM": "X"}, "HEADRACE_KAFKA_SASL_MECHANISM"),
        ({"HEADRACE_KAFKA_SASL_MECHANISM": "OAUTHBEARER"}, "HEADRACE_KAFKA_SASL_MECHANISM"),
        ({"HEADRACE_KAFKA_SECURITY": "SSL", "HEADRACE_KAFKA_USERNAME": "u"}, "takes no HEADRACE_KAFKA_USERNAME"),
        ({"HEADRACE_KAFKA_SECURITY": "PLAINTEXT", "HEADRACE_KAFKA_CAFILE": "ca.pem"}, "takes no certificate"),
        ({"HEADRACE_KAFKA_KEYFILE": "key.pem"}, "HEADRACE_KAFKA_CERTFILE"),
        ({"HEADRACE_KAFKA_SECURITY": "SASL_SSL"}, "HEADRACE_KAFKA_PASSWORD"),
        ({"HEADRACE_KAFKA_USERNAME": "u"}, "HEADRACE_KAFKA_PASSWORD"),
    ],
)
def test_signing_in_half_told(env: dict[str, str], named: str):
    with pytest.raises(SettingsError, match=named):
        KafkaSettings.from_env(env)


@pytest.mark.parametrize("kind", ALL)
def test_each_process_starts_with_no_variable_set(kind: type[ProcessSettings], tmp_path: Path):
    settings = kind.from_env({"HEADRACE_DATA": str(tmp_path)})
    assert settings.kafka == KafkaSettings()
    assert settings.data_dir == tmp_path
    assert settings.ops_port == 0
    assert len(dataclasses.fields(kind)) <= 30


def test_variables_are_named_after_process_and_field(tmp_path: Path):
    env = {
        "HEADRACE_DATA": str(tmp_path),
        "HEADRACE_OPS_PORT": "9100",
        "HEADRACE_WORKER_WORKER_ID": "w",
        "HEADRACE_WORKER_TIERS": "batch, shadow",
        "HEADRACE_WORKER_SLOTS": "3",
        "HEADRACE_BRIDGE_SLOTS": "x",
    }
    settings = WorkerSettings.from_env(env)
    assert (settings.ops_port, settings.worker_id, settings.tiers, settings.slots) == (
        9100,
        "w",
        ("batch", "shadow"),
        3,
    )


@pytest.mark.parametrize("kind", [KafkaSettings, *ALL])
def test_every_setting_is_read_by_some_process(kind: type[KafkaSettings | ProcessSettings]):
    """One that nothing reads would be taken and ignored."""
    rooms = ("streams", "workers", "bridge", "infra", "cli")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py") if path.name != "settings.py"]
    text = "\n".join(path.read_text() for path in files)
    unread = [f.name for f in dataclasses.fields(kind) if not re.search(rf"(settings|kafka)\.{f.name}\b", text)]
    assert not unread


@pytest.mark.parametrize("value", ["many", "-1", "1.5"])
def test_a_value_of_the_wrong_kind_is_named(value: str, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"HEADRACE_WORKER_SLOTS|slots is -1"):
        WorkerSettings.from_env({"HEADRACE_DATA": str(tmp_path), "HEADRACE_WORKER_SLOTS": value})


def test_the_grant_secret_is_made_once_for_all_processes(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: grant_secret(tmp_path, {}), range(16)))
    assert len(made) == 1
    path = tmp_path / "secrets" / "grant"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["grant"]
    [secret] = made
    settings = BridgeSettings.from_env({"HEADRACE_DATA": str(tmp_path)})
    assert settings.grant_secret == secret
    assert secret.decode() not in repr(settings)


def test_a_given_secret_makes_no_file_and_a_short_one_is_refused(tmp_path: Path):
    assert grant_secret(tmp_path, {"HEADRACE_GRANT_SECRET": "s" * 32}) == b"s" * 32
    with pytest.raises(SettingsError, match="HEADRACE_GRANT_SECRET"):
        grant_secret(tmp_path, {"HEADRACE_GRANT_SECRET": "short"})
    assert not list(tmp_path.iterdir())
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "grant").write_bytes(b"\n")
    with pytest.raises(SettingsError, match="remove it"):
        grant_secret(tmp_path, {})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"HEADRACE_OBJECTS": ""}, None),
        ({"HEADRACE_OBJECTS": "file:///srv/objects"}, ObjectSettings("/srv/objects")),
        ({"HEADRACE_OBJECTS": "s3://my-bucket"}, ObjectSettings("", "my-bucket")),
        ({"HEADRACE_OBJECTS": "s3://my-bucket/"}, ObjectSettings("", "my-bucket")),
        ({"HEADRACE_OBJECTS": "s3://my.bucket/some/where/"}, ObjectSettings("some/where", "my.bucket")),
        (
            {"HEADRACE_OBJECTS": "s3://my-bucket/a", "HEADRACE_OBJECTS_ENDPOINT": "http://store:8333"},
            ObjectSettings("a", "my-bucket", "http://store:8333"),
        ),
    ],
)
def test_object_stores(env: dict[str, str], expected: ObjectSettings | None):
    assert ObjectSettings.from_env(env) == expected
    assert LifecycleSettings.from_env(env).objects == expected


@pytest.mark.parametrize(
    "env",
    [
        {"HEADRACE_OBJECTS": "/srv/objects"},
        {"HEADRACE_OBJECTS": "file://srv/objects"},
        {"HEADRACE_OBJECTS": "gs://bucket"},
        {"HEADRACE_OBJECTS": "s3://"},
        {"HEADRACE_OBJECTS": "s3://key:hush@bucket/a"},
        {"HEADRACE_OBJECTS": "s3://bucket/../a"},
        {"HEADRACE_OBJECTS": "s3://bucket//a"},
        {"HEADRACE_OBJECTS": "s3://bucket", "HEADRACE_OBJECTS_ENDPOINT": "store:8333"},
        {"HEADRACE_OBJECTS": "s3://bucket", "HEADRACE_OBJECTS_ENDPOINT": "http://key:hush@store:8333"},
        {"HEADRACE_OBJECTS": "file:///srv", "HEADRACE_OBJECTS_ENDPOINT": "http://store:8333"},
        {"HEADRACE_OBJECTS_ENDPOINT": "http://store:8333"},
    ],
)
def test_object_stores_that_are_none(env: dict[str, str]):
    with pytest.raises(SettingsError, match="HEADRACE_OBJECTS") as caught:
        ObjectSettings.from_env(env)
    assert "hush" not in str(caught.value)
