"""The operators' commands against the real log."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.context import run_async
from cli.main import cli
from cli.registry import read_models, read_tenants, write
from infra.grants import read as read_grant
from infra.kafka import make_producer
from infra.settings import KafkaSettings, grant_secret
from infra.topics import ensure
from schemas.codec import encode
from schemas.errors import HeadraceError
from schemas.events import InferenceCancelled, WorkerReported
from schemas.topics import WORKERS, TopicSpec

pytestmark = pytest.mark.kafka
Run = Callable[..., Result]

SETTLED_S = 10.0


@pytest.fixture
def run(kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HEADRACE_KAFKA", kafka.bootstrap)
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    monkeypatch.delenv("HEADRACE_GRANT_SECRET", raising=False)

    def call(*arguments: str, fails: str | None = None) -> Result:
        result = CliRunner().invoke(cli, arguments)
        if fails is None:
            assert result.exit_code == 0, (result.output, result.exception)
        else:
            assert isinstance(result.exception, HeadraceError), result.output
            assert fails in result.exception.message
        return result

    return call


def fresh(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(4)}"


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_tenant_from_its_first_key_to_its_end(run: Run, kafka: KafkaSettings) -> None:
    name = fresh("cli")
    (first,) = lines(run("tenants", "create", name, "--json"))
    assert re.fullmatch(rf"hr-{first['key_id']}-[0-9a-f]{{48}}", first["key"])
    run("tenants", "create", name, fails="already")
    (second,) = lines(run("tenants", "keys", "add", name, "--name", "ci", "--tiers", "batch", "--json"))
    kept = run_async(read_tenants(kafka))[name]
    assert [key.sha256 for key in kept.keys] == [hashlib.sha256(k["key"].encode()).hexdigest() for k in (first, second)]
    assert [key.tiers for key in kept.keys] == [("interactive", "batch"), ("batch",)]

    listed = (
        run("tenants", "list", "--json").stdout
        + run("tenants", "keys", "list", name).stdout
        + run("tenants", "list").stdout
    )
    for secret in (first["key"], second["key"], kept.cache_salt, kept.keys[0].sha256):
        assert secret not in listed

    run("tenants", "keys", "revoke", name, second["key_id"])
    run("tenants", "keys", "revoke", name, second["key_id"], fails="revoked already")
    run("tenants", "keys", "revoke", name, "nokey", fails="no key 'nokey'")
    run("tenants", "revoke", name)
    ended = run_async(read_tenants(kafka))[name]
    assert ended.disabled
    assert ended.cache_salt == kept.cache_salt
    assert all(key.revoked_ms for key in ended.keys)
    run("tenants", "grant", name, fails="shut out")


def test_a_key_stands_alone_on_standard_output_and_changes_are_told_in_json(run: Run) -> None:
    name = fresh("cli")
    for command in (("create", name), ("keys", "add", name)):
        made = run("tenants", *command)
        assert re.fullmatch(r"hr-[0-9a-f]{8}-[0-9a-f]{48}\n", made.stdout)
        assert f"This is the key of {name} (id " in made.stderr
        assert made.stdout.strip() not in made.stderr
    key_id = made.stdout.split("-")[1]
    (one,) = lines(run("tenants", "keys", "revoke", name, key_id, "--json"))
    assert (one["disabled"], [key["revoked_ms"] is None for key in one["keys"]]) == (False, [True, False])
    (ended,) = lines(run("tenants", "revoke", name, "--json"))
    assert (ended["tenant"], ended["disabled"]) == (name, True)
    assert all(key["revoked_ms"] for key in ended["keys"])
    assert "sha256" not in json.dumps(ended)


def test_a_grant_names_the_tenants_own_topic(run: Run, kafka: KafkaSettings, tmp_path: Path) -> None:
    name = fresh("cli")
    (key,) = lines(run("tenants", "create", name, "--json"))
    (given,) = lines(run("tenants", "grant", name, "--tiers", "batch", "--expires", "15m", "--json"))
    grant = read_grant(grant_secret(tmp_path), given["grant"])
    assert (grant.tenant, grant.key_id, grant.tiers) == (name, key["key_id"], ("batch",))
    assert (grant.reply.topic, grant.reply.partition, grant.reply.encoding) == (f"tokens.{name}", 0, "json")
    assert grant.expires_ms == given["expires_ms"]
    assert any(row["topic"] == f"tokens.{name}" for row in lines(run("topics", "list", "--json")))
    assert run("tenants", "grant", name).stdout.count(".") == 2
    run("tenants", "grant", name, "--tiers", "shadow", fails="doesn't hold for shadow")
    run("tenants", "keys", "revoke", name, key["key_id"])
    run("tenants", "grant", name, fails="no key that is not revoked")
    run("tenants", "grant", name, "--key-id", key["key_id"], fails="is revoked")
    run("tenants", "grant", fresh("nobody"), fails="there is no tenant")


def test_models_are_registered_and_promoted(run: Run, kafka: KafkaSettings, tmp_path: Path) -> None:
    name = fresh("model")
    path = tmp_path / "models.yaml"
    models = [
        {"name": name, "version": v, "engine": "scripted", "context_length": 100, "partitions": 1} for v in ("1", "2")
    ]
    path.write_text(json.dumps({"models": models}))
    run("models", "register", "--file", str(path), "--no-promote")
    assert name not in run_async(read_models(kafka)).stable
    run("models", "promote", name, "2")
    found = run_async(read_models(kafka))
    assert found.stable[name] == "2"
    run("models", "promote", name, "3", fails=f"{name} version 3 isn't registered")
    rows = [row for row in lines(run("models", "list", "--json")) if row["model"] == name]
    assert [(row["version"], row["stable"]) for row in rows] == [("1", False), ("2", True)]
    assert name in run("models", "list").stdout
    topics = {row["topic"] for row in lines(run("topics", "list", "--json"))}
    assert {f"work.{name}.{v}.{tier}" for v in ("1", "2") for tier in ("interactive", "batch")} <= topics
    before = len(found.versions)
    run("models", "register", "--file", str(path), "--no-promote")  # says nothing new, so writes nothing
    assert len(run_async(read_models(kafka)).versions) == before


def test_a_promotion_says_when_no_worker_serves_the_version(run: Run, kafka: KafkaSettings, tmp_path: Path) -> None:
    name = fresh("model")
    path = tmp_path / "models.yaml"
    entry = {"name": name, "version": "1", "engine": "scripted", "context_length": 100, "partitions": 1}
    path.write_text(json.dumps({"models": [entry]}))
    run("models", "register", "--file", str(path), "--no-promote")

    def report(worker: str, state: str, version: str = "1") -> None:
        event = WorkerReported(worker, name, version, state, (), 8, 0, 0)
        run_async(write(kafka, WORKERS, (worker, event)))

    told = f"no worker serves {name} version 1 yet: requests wait until one does; start one with `headrace worker {name} 1`"
    for worker, state, version in (("gone", "stopped", "1"), ("leaving", "draining", "1"), ("other", "ready", "2")):
        report(f"{worker}-{name}", state, version)
    promoted = run("models", "promote", name, "1")
    assert told in promoted.stderr
    assert promoted.stdout == f"Requests for {name} go to version 1 now.\n"
    (row,) = lines(run("models", "promote", name, "1", "--json"))
    assert row == {"model": name, "version": "1", "promoted": True, "workers": 0}
    report(f"here-{name}", "ready")
    assert run("models", "promote", name, "1").stderr == ""


def test_a_registration_says_what_it_changes(run: Run, kafka: KafkaSettings, tmp_path: Path) -> None:
    name = fresh("model")
    path = tmp_path / "models.yaml"
    entry = {"name": name, "version": "1", "engine": "scripted", "context_length": 100, "partitions": 1, "slots": 32}
    register = ("models", "register", "--file", str(path))

    path.write_text(json.dumps({"models": [entry]}))
    first = f"{name} version 1 is registered and promoted.\n"
    assert run(*register).stdout == first
    assert run(*register).stdout == first

    path.write_text(json.dumps({"models": [entry | {"slots": 16, "context_length": 200}]}))
    assert run(*register).stdout == (
        f"{first}{name} version 1 was there already and has changed: context_length 100 → 200, slots 32 → 16. "
        "Running workers keep what they were started with.\n"
    )
    path.write_text(json.dumps({"models": [entry | {"context_length": 200}]}))
    (told,) = lines(run(*register, "--json"))
    assert told["changed"] == {"slots": [16, 32]}
    assert run_async(read_models(kafka)).versions[name, "1"].slots == 32


def test_ensure_says_what_it_did(run: Run) -> None:
    run("topics", "ensure")  # other tests register versions and make no topics for them
    reports = lines(run("topics", "ensure", "--json"))
    until_s = time.monotonic() + SETTLED_S  # the broker may tell a moment longer what it was told to correct
    while {report["action"] for report in reports} != {"unchanged"} and time.monotonic() < until_s:
        reports = lines(run("topics", "ensure", "--json"))
    assert {"tokens", "lifecycle", "registry"} <= {report["topic"] for report in reports}
    assert {report["action"] for report in reports} == {"unchanged"}
    assert "unchanged" in run("topics", "ensure").stdout
    asked = {report["topic"]: report for report in lines(run("topics", "ensure", "--replication", "3", "--json"))}
    assert asked["tokens"]["done"].startswith("unchanged; it has 1 replica, not 3: this command can't change that")


async def _fill(kafka: KafkaSettings, topic: str) -> None:
    """Three good events among junk of every kind, over two partitions, one with a grant."""
    await ensure(kafka, [TopicSpec(topic, 2, "none")])
    producer = make_producer(kafka)
    await producer.start()
    try:
        for partition, value, headers in (
            (0, encode(InferenceCancelled("first")), [("grant", b"secret"), ("traceparent", b"00-x")]),
            (0, b"\xff\x00", []),
            (0, None, []),
            (1, b'{"type":"InferenceCancelled","request_id":"second"}', []),
            (1, bytes.fromhex("c301") + b"12345678", []),
            (1, encode(InferenceCancelled("third"))[:-3], []),
            (1, encode(InferenceCancelled("third")), []),
        ):
            await producer.send_and_wait(
                topic, value, key=None if value else b"k\xff", partition=partition, headers=headers
            )
    finally:
        await producer.stop()


def test_tail_shows_events_and_junk_and_no_secret(run: Run, kafka: KafkaSettings) -> None:
    topic = fresh("tailed")
    run_async(_fill(kafka, topic))
    records = lines(run("topics", "tail", topic, "--from", "beginning", "--no-follow", "--json"))
    assert [r["event"]["request_id"] for r in records if "event" in r] == ["first", "second", "third"]
    assert sum("undecodable" in r for r in records) == 4
    assert records[0]["headers"] == {"traceparent": "00-x"}
    assert {"topic", "partition", "offset", "timestamp_ms", "key"} <= records[0].keys()
    shown = run("topics", "tail", topic, "--from", "beginning", "--no-follow").stdout
    assert "secret" not in shown
    assert len(shown.splitlines()) == 7
    assert "undecodable" in shown


def test_tail_starts_and_ends_where_it_is_told(run: Run, kafka: KafkaSettings) -> None:
    topic = fresh("tailed")
    run_async(_fill(kafka, topic))
    assert run("topics", "tail", topic, "--no-follow", "--json").stdout == ""
    last = lines(run("topics", "tail", topic, "--from", "-1", "--no-follow", "--json"))
    assert [(r["partition"], r["offset"]) for r in last] == [(0, 2), (1, 3)]
    assert len(lines(run("topics", "tail", topic, "--from", "-100", "--no-follow", "--json"))) == 7
    assert len(lines(run("topics", "tail", topic, "--from", "beginning", "--limit", "2", "--json"))) == 2
    run("topics", "tail", fresh("nothing"), fails="there is no topic")
