"""Quotas as operators set and read them, and what a tenant has used, off the real log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka.partitioner import DefaultPartitioner
from click.testing import CliRunner, Result

from cli.context import run_async
from cli.main import cli
from cli.registry import now_ms, read_states, write
from cli.usage import usages
from decisions.ledger import Cost, hold, settle
from decisions.ledger_rows import saved_counter
from decisions.quota import limits_for
from infra.kafka import make_consumer
from infra.log import EventProducer
from infra.read import Positions, assign_all
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import (
    ApiKey,
    Attempt,
    Event,
    InferenceAdmitted,
    InferenceCompleted,
    InferenceFailed,
    LedgerSaved,
    ModelVersionRegistered,
    Position,
    Quota,
    Reply,
    TenantChanged,
    Timings,
    Usage,
)
from schemas.topics import DEFAULTS, LIFECYCLE, REGISTRY, SHADOW, ledger_topic, requests_topic
from tests.cli.test_commands import fresh, lines

pytestmark = pytest.mark.kafka
Run = Callable[..., Result]
HOLDS_MS = 600_000


@pytest.fixture
def run(kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HEADRACE_KAFKA", kafka.bootstrap)
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))

    def call(*arguments: str, fails: str | None = None, usage: str | None = None) -> Result:
        result = CliRunner().invoke(cli, ["tenants", *arguments])
        if fails is not None:
            assert isinstance(result.exception, HeadraceError), result.output
            assert fails in f"{result.exception.param} {result.exception.message}"
        elif usage is not None:
            assert result.exit_code == 2, result.output
            assert usage in re.sub(r"\W+", " ", result.stderr)
        else:
            assert result.exit_code == 0, (result.output, result.exception)
        return result

    return call


@pytest.fixture
def tenant(run: Run) -> tuple[str, str]:
    """A new tenant and its key's id."""
    name = fresh("quotas")
    (made,) = lines(run("create", name, "--json"))
    return name, made["key_id"]


@pytest.fixture
def no_defaults_left(kafka: KafkaSettings) -> Iterator[None]:
    """The run's other tests share the log: default quotas are theirs, too. These tests set them for a tier that nobody else uses."""
    yield
    if (held := run_async(read_states(kafka)).get(DEFAULTS)) is not None and held.quotas:
        run_async(write(kafka, "tenants", (DEFAULTS, TenantChanged(DEFAULTS, "", (), held.created_ms))))


# --- setting ---------------------------------------------------------------------------------------------------------


def test_a_quota_is_set_replaced_shown_and_removed(run: Run, tenant: tuple[str, str], kafka: KafkaSettings) -> None:
    name, key_id = tenant
    told = run("set-quota", name, "--tier", "interactive", "--requests-per-minute", "60", "--tokens-per-day", "1000000")
    assert told.stdout == (
        f"{name}: all keys and models on interactive: 60 requests a minute, 1,000,000 tokens a day.\n"
    )
    run("set-quota", name, "--tier", "interactive", "--key", key_id, "--concurrent-requests", "2")
    run("set-quota", name, "--tier", "batch", "--key", "*", "--tokens-per-month", "5")
    (set_,) = lines(run("set-quota", name, "--tier", "interactive", "--tokens-per-minute", "900", "--json"))
    expected = [
        {"tier": "interactive", "key_id": "", "model": "", "tokens_per_minute": 900},
        {"tier": "interactive", "key_id": key_id, "model": "", "concurrent_requests": 2},
        {"tier": "batch", "key_id": "*", "model": "", "tokens_per_month": 5},
    ]
    assert set_ == {"tenant": name, "quotas": expected}

    (listed,) = [row for row in lines(run("list", "--json")) if row["tenant"] == name]
    assert listed["quotas"] == expected
    assert [
        {k: v for k, v in row.items() if k not in ("tenant", "source")} for row in lines(run("quotas", name, "--json"))
    ] == expected
    shown = run("quotas", name).stdout
    assert all(
        words in shown for words in ("all keys and models", f"key {key_id}", "each key", "900 tokens a minute", "own")
    )
    (row,) = [line for line in run("list").stdout.splitlines() if name in line]
    assert row.split()[1:4] == ["active", "1", "3"]

    run("set-quota", name, "--tier", "interactive", "--remove")
    run(
        "set-quota",
        name,
        "--tier",
        "interactive",
        "--remove",
        fails="no such quota: all keys and models on interactive",
    )
    kept = run_async(read_states(kafka))[name]
    assert kept.quotas == (
        Quota("interactive", key_id, concurrent_requests=2),
        Quota("batch", "*", tokens_per_month=5),
    )
    assert [key.key_id for key in kept.keys] == [key_id]


def test_a_quota_outlives_every_other_change_of_its_tenant(
    run: Run, tenant: tuple[str, str], kafka: KafkaSettings
) -> None:
    name, key_id = tenant
    run("set-quota", name, "--tier", "interactive", "--requests-per-minute", "60")
    run("keys", "add", name)
    run("keys", "revoke", name, key_id)
    run("revoke", name)
    ended = run_async(read_states(kafka))[name]
    assert ended.disabled
    assert ended.quotas == (Quota("interactive", requests_per_minute=60),)


def test_what_cant_be_meant_is_refused_and_changes_nothing(
    run: Run, tenant: tuple[str, str], kafka: KafkaSettings
) -> None:
    name, _ = tenant
    one = ("--tokens-per-day", "1")
    run(
        "set-quota",
        name,
        "--tier",
        "interactive",
        usage="Give at least one limit or reserved percent or unlimited or remove",
    )
    run("set-quota", name, "--tier", "interactive", *one, "--unlimited", usage="Give at least one limit")
    run("set-quota", name, "--tier", "interactive", *one, "--remove", usage="Give at least one limit")
    run("set-quota", name, "--tier", "gold", *one, usage="gold is not one of")
    run("set-quota", name, *one, usage="Missing option tier")
    run("set-quota", name, "--tier", "interactive", "--tokens-per-day", "0", usage="0 is not in the range")
    run("set-quota", name, "--tier", "interactive", "--tokens-per-day", str(10**12 + 1), usage="is not in the range")
    run("set-quota", "--tier", "interactive", *one, usage="Name a tenant")
    run("set-quota", name, "--default", "--tier", "interactive", *one, usage="Name a tenant")
    run("set-quota", fresh("nobody"), "--tier", "interactive", *one, fails="there is no tenant")
    run("set-quota", name, "--tier", "interactive", "--key", "nokey", *one, fails="no key 'nokey'")
    run("set-quota", name, "--tier", "interactive", "--key", "a b", *one, fails="characters that can be seen")
    run("set-quota", name, "--tier", "interactive", "--model", "a/b", *one, fails="a model's name has")
    assert run_async(read_states(kafka))[name].quotas == ()


def test_no_limit_at_all_is_said_in_so_many_words(run: Run, tenant: tuple[str, str], kafka: KafkaSettings) -> None:
    name, _ = tenant
    assert run("set-quota", name, "--tier", "batch", "--unlimited").stdout.endswith("on batch: unlimited.\n")
    assert run_async(read_states(kafka))[name].quotas == (Quota("batch"),)


def test_a_model_that_isnt_registered_is_told_and_counts_once_it_is(
    run: Run, tenant: tuple[str, str], kafka: KafkaSettings
) -> None:
    name, _ = tenant
    model = fresh("model")
    asked = ("set-quota", name, "--tier", "interactive", "--model", model, "--requests-per-minute", "5", "--json")
    told = run(*asked)
    assert f"no model {model!r} is registered" in told.stderr
    assert lines(told)[0]["quotas"][0]["model"] == model
    run_async(write(kafka, REGISTRY, (model, ModelVersionRegistered(model, "1", "scripted", "", 100))))
    assert run(*asked).stderr == ""


# --- what holds by default -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_defaults_left")
def test_defaults_hold_for_whoever_has_no_quota_of_its_own_on_the_tier(run: Run, tenant: tuple[str, str]) -> None:
    name, _ = tenant
    told = run("set-quota", "--default", "--tier", SHADOW, "--key", "*", "--requests-per-minute", "9")
    assert told.stdout == "By default: each key on shadow: 9 requests a minute.\n"
    run("set-quota", "--default", "--tier", SHADOW, "--key", "k1", "--requests-per-minute", "9", fails="name no key")

    def sources() -> list[tuple[str, str]]:
        return [(row["tier"], row["source"]) for row in lines(run("quotas", name, "--json"))]

    run("set-quota", name, "--tier", "interactive", "--tokens-per-day", "5")
    assert sources() == [("interactive", "own"), (SHADOW, "default")]
    own = run("set-quota", name, "--tier", SHADOW, "--unlimited")
    assert own.stderr == f"the default quotas of shadow no longer hold for {name}\n"
    assert sources() == [("interactive", "own"), (SHADOW, "own")]
    back = run("set-quota", name, "--tier", SHADOW, "--remove")
    assert back.stderr == f"the default quotas of shadow hold again for {name}\n"
    assert [row["source"] for row in lines(run("quotas", "--default", "--json"))] == ["default"]
    run("set-quota", "--default", "--tier", SHADOW, "--key", "*", "--remove")
    assert run("quotas", "--default").stdout.startswith("No limit holds by default")


@pytest.mark.usefixtures("no_defaults_left")
def test_what_holds_by_default_is_no_tenant_that_calls(run: Run, kafka: KafkaSettings) -> None:
    run("set-quota", "--default", "--tier", SHADOW, "--requests-per-minute", "9")
    run("create", DEFAULTS, fails="a tenant's name has")
    for command in (("keys", "add"), ("keys", "list"), ("grant",), ("revoke",), ("usage",)):
        run(*command, DEFAULTS, fails="there is no tenant '*'")
    run("keys", "revoke", DEFAULTS, "k1", fails="there is no tenant '*'")
    assert not any(row["tenant"] == DEFAULTS for row in lines(run("list", "--json")))
    assert not any(line.split()[:1] == [DEFAULTS] for line in run("list").stdout.splitlines())
    held = run_async(read_states(kafka))[DEFAULTS]
    assert (held.keys, held.disabled) == ((), False)


# --- what was used ---------------------------------------------------------------------------------------------------


def admitted(tenant: str, key_id: str, request_id: str, tokens: int, scopes: tuple[str, ...]) -> InferenceAdmitted:
    at_ms = now_ms()
    source = Position(requests_topic(SHADOW), 0, 0)
    return InferenceAdmitted(
        request_id, tenant, key_id, "m", "1", SHADOW, Reply("tokens", 0), "work.m.1.shadow", 0, 10, tokens - 10, tokens, at_ms, at_ms + HOLDS_MS,
        source, scopes=scopes,
    )  # fmt: skip


def completed(tenant: str, request_id: str, tokens: int) -> InferenceCompleted:
    used = Usage(10, tokens - 10)
    return InferenceCompleted(request_id, tenant, "m", "1", SHADOW, Attempt(1, 1), (), used, Timings(), "w")


async def tell(kafka: KafkaSettings, tenant: str, *events: Event) -> None:
    """On `lifecycle`, as admission and endings do."""
    await write(kafka, LIFECYCLE, *((tenant, event) for event in events))


def scopes_of(found: list[Any]) -> dict[str, Any]:
    return {one["scope"]: one for one in found}


def limits_of(one: Any) -> dict[str, tuple[int, int, int, int]]:
    return {
        limit["kind"]: (limit["limit"], limit["reserved"], limit["spent"], limit["remaining"])
        for limit in one["limits"]
    }


def test_usage_is_what_lifecycle_tells(run: Run, tenant: tuple[str, str], kafka: KafkaSettings) -> None:
    name, key_id = tenant
    run(
        "set-quota",
        name,
        "--tier",
        SHADOW,
        "--requests-per-minute",
        "10",
        "--tokens-per-day",
        "1000",
        "--concurrent-requests",
        "4",
    )
    run("set-quota", name, "--tier", SHADOW, "--key", "*", "--tokens-per-month", "500")
    run("set-quota", name, "--tier", SHADOW, "--model", "*", "--tokens-per-minute", "400")
    scopes = ("", f"key {key_id}", "model m")
    failed = InferenceFailed("r3", name, "m", "1", SHADOW, "cancelled", "no")
    other = admitted(fresh("other"), "k", "r1", 999, ("",))
    run_async(tell(kafka, name, *(admitted(name, key_id, rid, 100, scopes) for rid in ("r1", "r2", "r3"))))
    run_async(tell(kafka, name, completed(name, "r1", 30), failed, completed(name, "r1", 30), other))

    found = lines(run("usage", name, "--json"))
    assert {one["tier"] for one in found} == {SHADOW}
    by_scope = scopes_of(found)
    assert list(by_scope) == sorted(scopes)
    whole = by_scope[""]
    assert (whole["requests"], whole["tokens"], whole["running"], whole["reserved_tokens"]) == (3, 30, 1, 100)
    assert limits_of(whole) == {
        "requests_per_minute": (10, 0, 3, 7),
        "concurrent_requests": (4, 1, 0, 3),
        "tokens_per_day": (1_000, 100, 30, 870),
    }
    assert limits_of(by_scope[f"key {key_id}"]) == {"tokens_per_month": (500, 100, 30, 370)}
    assert limits_of(by_scope["model m"]) == {"tokens_per_minute": (400, 100, 30, 270)}
    resets = {limit["kind"]: limit["reset_ms"] for one in found for limit in one["limits"]}
    assert resets["concurrent_requests"] is None
    assert 0 < resets["requests_per_minute"] <= 60_000
    day_ends_ms = whole["at_ms"] + resets["tokens_per_day"]
    assert day_ends_ms % 86_400_000 == 0

    shown = run("usage", name, "--tier", SHADOW).stdout
    assert all(
        words in shown for words in ("tokens a day", "870", "when they end", f"key {key_id}", "model m", "In all")
    )
    assert lines(run("usage", name, "--tier", "batch", "--json")) == []
    assert "has asked for nothing yet" in run("usage", name, "--tier", "batch").stdout


def test_usage_goes_on_from_the_newest_row_and_reads_nothing_before_the_mark(
    run: Run, tenant: tuple[str, str], kafka: KafkaSettings
) -> None:
    name, key_id = tenant
    run("set-quota", name, "--tier", SHADOW, "--tokens-per-day", "1000")
    run_async(
        tell(kafka, name, admitted(name, key_id, "forgotten", 1, ("",)))
    )  # before the mark: rows hold it, or don't
    partition, end = run_async(_end_of(kafka, name))
    made, counters = hold({}, ("",), Cost(200), now_ms())
    counters |= settle(counters, made, 150)
    _, counters = hold(counters, ("",), Cost(50), now_ms())

    newest = _row(name, end, counters)
    older = _row(name, max(0, end - 1), {"": counters[""]}, requests=77)
    mark = LedgerSaved("", SHADOW, end, now_ms(), end)
    rows = ((f"{name}/new", newest), (f"{name}/old", older), ("/new", mark))
    run_async(_save(kafka, partition, rows))
    run_async(tell(kafka, name, admitted(name, key_id, "after", 25, ("",))))

    (whole,) = lines(run("usage", name, "--tier", SHADOW, "--json"))
    assert (whole["requests"], whole["tokens"], whole["running"], whole["reserved_tokens"]) == (3, 150, 2, 75)
    assert limits_of(whole) == {"tokens_per_day": (1_000, 75, 150, 775)}


async def _end_of(kafka: KafkaSettings, tenant: str) -> tuple[int, int]:
    """The tenant's partition of `lifecycle`, and where it ends."""
    consumer = make_consumer(kafka)
    await consumer.start()
    try:
        ends: Positions = await assign_all(consumer, LIFECYCLE)
    finally:
        await consumer.stop()
    numbers = sorted(place.partition for place in ends)
    partition = int(DefaultPartitioner()(tenant.encode(), numbers, numbers))
    return partition, next(end for place, end in ends.items() if place.partition == partition)


def _row(tenant: str, through: int, counters: Any, requests: int | None = None) -> LedgerSaved:
    kept = tuple(
        saved_counter(scope, counter if requests is None else replace(counter, requests_total=requests))
        for scope, counter in counters.items()
    )
    return LedgerSaved(tenant, SHADOW, through, now_ms(), counters=kept)


async def _save(kafka: KafkaSettings, partition: int, rows: tuple[tuple[str, LedgerSaved], ...]) -> None:
    producer = EventProducer(kafka, "cli-tests")
    await producer.start()
    try:
        for key, row in rows:
            await producer.send_and_wait(ledger_topic(SHADOW), row, key=key, partition=partition)
    finally:
        await producer.stop()


# --- which scopes are shown ------------------------------------------------------------------------------------------


def test_named_scopes_are_shown_before_they_are_used_and_each_model_once_it_is() -> None:
    keys = (ApiKey("k1", "", (), 0), ApiKey("gone", "", (), 0, revoked_ms=1))
    quotas = (
        Quota("batch", "*", tokens_per_day=100),
        Quota("batch", "k1", tokens_per_day=7),
        Quota("batch", "", "*", tokens_per_day=100),
        Quota("batch", "", "named", tokens_per_day=100),
        Quota("batch", "*", "*", requests_per_minute=1),
    )
    at_ms = int(time.time() * 1000)
    own = TenantChanged("acme", "", keys, 0, quotas=quotas)
    sourced = [("own", quota) for quota in quotas]

    unused = list(usages("batch", own, sourced, {}, at_ms))
    assert [(one.scope, [gauge.limit for gauge in one.gauges]) for one in unused] == [
        ("key k1", [7]),
        ("model named", [100]),
    ]
    _, counters = hold({}, limits_for(quotas, "k1", "m"), Cost(5), at_ms)
    used = list(usages("batch", own, sourced, counters, at_ms))
    assert [(one.scope, one.source) for one in used] == [
        ("", ""),
        ("key k1", "own"),
        ("key k1 model m", "own"),
        ("model m", "own"),
        ("model named", "own"),
    ]
    assert [gauge.remaining for one in used for gauge in one.gauges] == [2, 0, 95, 100]


def test_slots_are_reserved_beside_the_default_quotas_and_no_more_than_there_are(run: Run) -> None:
    model, (gold, silver) = fresh("reserved"), (fresh("gold"), fresh("silver"))
    for name in (gold, silver):
        run("create", name)
    some = ("--tier", "interactive", "--model", model, "--reserved-percent")
    (set_quota,) = lines(run("set-quota", gold, *some, "70", "--json"))
    assert set_quota["quotas"] == [{"tier": "interactive", "key_id": "", "model": model, "reserved_percent": 70}]
    assert "70 % of the slots reserved" in run("quotas", gold).output
    run("set-quota", silver, *some, "40", fails="reserved_percent 30 percent of")
    run("set-quota", silver, *some, "30")
    run("set-quota", gold, *some, "60")
    run("set-quota", silver, *some, "40")
    run("set-quota", gold, "--tier", "interactive", "--reserved-percent", "5", fails="name the model")
    run("set-quota", "--default", *some, "5", usage="Slots are reserved for one tenant")
    run("set-quota", gold, *some[:-1], "--remove")
    assert "reserved" not in run("quotas", gold).output
