"""Dead letters on the real log: listed, shown, asked again, dropped."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.context import run_async
from cli.main import cli
from decisions.dead_letters import BELONGING
from infra.dead_letters import dead_letter
from infra.grants import read as read_grant
from infra.log import EventDecoder, EventProducer
from infra.objects import DEFAULT_FOLDER
from infra.payloads import Payloads
from infra.read import read_to_end
from infra.settings import KafkaSettings, ProcessSettings, grant_secret
from schemas.codec import encode
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, InferenceScheduled, Message, PayloadStored, Reply, Sampling
from schemas.ids import request_id
from schemas.payloads import Stored, key_of
from schemas.topics import GRANT_HEADER, TENANTS, TOKENS, requests_topic

pytestmark = pytest.mark.kafka
Run = Callable[..., Result]


@dataclass
class Raw:
    """A record that some process could not handle."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    partition: int = 2
    offset: int = field(default_factory=count(7).__next__)
    timestamp: int = 1_800_000_000_000
    headers: tuple[tuple[str, bytes], ...] = (("grant", b"very secret"), ("traceparent", b"00-1-2-03"))


@pytest.fixture
def run(kafka: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HEADRACE_KAFKA", kafka.bootstrap)
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    monkeypatch.delenv("HEADRACE_GRANT_SECRET", raising=False)

    def call(*arguments: str, status: int = 0, fails: str | None = None) -> Result:
        result = CliRunner().invoke(cli, arguments)
        if fails is None:
            assert result.exit_code == status, (result.output, result.exception)
        else:
            assert isinstance(result.exception, HeadraceError), result.output
            assert fails in result.exception.message
        return result

    return call


@pytest.fixture
def topic() -> str:
    """A work topic that no other test's letters name."""
    return f"work.m{secrets.token_hex(4)}.1.interactive"


def put_aside(kafka: KafkaSettings, *records: Raw) -> None:
    async def work() -> None:
        producer = EventProducer(kafka, "test")
        await producer.start()
        try:
            for record in records:
                await dead_letter(producer, record, "internal_error", "LookupError in admission", "admission")
        finally:
            await producer.stop()

    run_async(work())


def scheduled(tenant: str, model: str = "m") -> bytes:
    reply = Reply(TOKENS, 3)
    return encode(InferenceScheduled("old", tenant, model, "1", "batch", (1, 2), Sampling(), 10, 5, reply, "salt"))


def listed(run: Run, topic: str, *more: str) -> list[dict[str, Any]]:
    lines = run("dead-letters", "list", "--topic", topic, "--json", *more).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_letters_are_listed_and_shown_without_their_grant(run: Run, kafka: KafkaSettings, topic: str) -> None:
    put_aside(kafka, Raw(topic, scheduled("acme"), b"k"), Raw(topic, b"\xff\x00"))
    event, junk = listed(run, topic)
    assert (event["state"], event["partition"], event["key"]) == ("open", 2, "k")
    assert junk["offset"] == event["offset"] + 1
    assert (event["reason"], event["process"]) == ("internal_error", "admission")
    assert topic in run("dead-letters", "list", "--topic", topic).stdout
    assert not listed(run, topic, "--reason", "poisoned")

    shown = run("dead-letters", "show", str(event["id"]))
    assert "InferenceScheduled" in shown.stdout
    assert "traceparent" in shown.stdout
    assert "very secret" not in shown.stdout
    whole = json.loads(run("dead-letters", "show", str(junk["id"]), "--json").stdout)
    assert (whole["value"], whole["headers"]) == ("/wA=", {"traceparent": "00-1-2-03"})
    run("dead-letters", "show", "999999999", fails="no dead letter 999999999")


def test_dropped_letters_are_no_longer_open(run: Run, kafka: KafkaSettings, topic: str) -> None:
    put_aside(kafka, *(Raw(topic, b"junk") for _ in range(3)))
    first, *others = (letter["id"] for letter in listed(run, topic))
    run("dead-letters", "drop", str(first))
    assert [letter["id"] for letter in listed(run, topic)] == others
    assert [letter["state"] for letter in listed(run, topic, "--all")] == ["dropped", "open", "open"]
    run("dead-letters", "drop", str(first), fails="was dropped already")
    run("dead-letters", "drop", "--all", "--topic", topic)
    assert not listed(run, topic)
    assert "No dead letters" in run("dead-letters", "drop", "--all", "--topic", topic).stdout


def test_a_record_that_was_put_aside_twice_is_one_letter(run: Run, kafka: KafkaSettings, topic: str) -> None:
    """Whoever did it crashed before it had committed the record."""
    first = Raw(topic, b"junk")
    put_aside(kafka, first, replace(first), Raw(topic, b"junk too"))
    one, other = listed(run, topic)
    assert (one["offset"], other["offset"]) == (first.offset, first.offset + 1)
    assert other["id"] >= one["id"] + 2
    run("dead-letters", "drop", str(one["id"]))
    put_aside(kafka, replace(first))
    assert [letter["id"] for letter in listed(run, topic)] == [other["id"]], "what is dropped stays dropped"


def test_a_letter_is_found_by_any_of_its_numbers(run: Run, kafka: KafkaSettings, topic: str) -> None:
    """Whoever follows `dead-letters` sees them all."""
    tenant = f"t{secrets.token_hex(4)}"
    run("tenants", "create", tenant)
    junk, work = Raw(topic, b"junk"), Raw(topic, scheduled(tenant))
    put_aside(kafka, junk, replace(junk), replace(junk), work, replace(work))
    one, other = listed(run, topic)
    assert one["others"] == [one["id"] + 1, one["id"] + 2]
    first, *later = (str(number) for number in (one["id"], *one["others"]))
    for number in (first, *later):
        whole = json.loads(run("dead-letters", "show", number, "--json").stdout)
        assert (whole["id"], whole["others"], whole["value"]) == (one["id"], one["others"], "anVuaw==")
        told = " ".join(run("dead-letters", "show", number).stdout.split())
        assert f"letter {first}, the record of {', '.join(later)}, too: it was put aside 3 times" in told
    dropped = run("dead-letters", "drop", later[1], later[0]).stdout
    assert " ".join(dropped.split()) == f"{first}: dropped (with {', '.join(later)}, of the same record)"
    assert [letter["id"] for letter in listed(run, topic)] == [other["id"]]
    for number in (first, *later):
        run("dead-letters", "drop", number, fails=f"{number} was dropped already")
    asked = json.loads(run("dead-letters", "retry", str(other["others"][0]), "--json").stdout)
    assert (asked["id"], asked["state"]) == (other["id"], "retried")
    _, request = asyncio.run(found_request(kafka, "batch", asked["request_id"]))
    assert request.prompt_token_ids == (1, 2)


def test_a_letter_of_another_topic_is_shown_and_dropped_and_not_written_again(run: Run, kafka: KafkaSettings) -> None:
    """Not even where it holds what elsewhere would be asked again."""
    records = [Raw(topic, scheduled("acme"), b"k") for topic in BELONGING]
    put_aside(kafka, *records)
    for record in records:
        (mine,) = [letter for letter in listed(run, record.topic) if letter["offset"] == record.offset]
        number = str(mine["id"])
        assert record.topic in run("dead-letters", "show", number).stdout
        refused = run("dead-letters", "retry", number, "--json", status=1)
        assert "drop the letter" in json.loads(refused.stdout)["error"]
        run("dead-letters", "drop", number)
        assert mine["id"] not in [letter["id"] for letter in listed(run, record.topic)]


def test_a_letter_whose_value_is_left_out_says_so(run: Run, kafka: KafkaSettings) -> None:
    put_aside(kafka, junk := Raw(TENANTS, b"a salt", b"acme"))
    (mine,) = [letter for letter in listed(run, TENANTS) if letter["offset"] == junk.offset]
    shown = run("dead-letters", "show", str(mine["id"])).stdout
    assert "may hold a tenant's secrets" in " ".join(shown.split())
    assert "a salt" not in shown + run("dead-letters", "show", str(mine["id"]), "--json").stdout


@pytest.mark.parametrize("arguments", [(), ("7", "--all"), ("7", "--topic", "x")])
def test_which_letters_are_meant_must_be_clear(run: Run, arguments: tuple[str, ...]) -> None:
    assert "give the ids" in run("dead-letters", "drop", *arguments, status=2).output


def test_a_request_is_asked_again_for_its_tenant_under_a_new_id(
    run: Run, kafka: KafkaSettings, topic: str, tmp_path: Path
) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    run("tenants", "create", tenant)
    put_aside(kafka, Raw(topic, scheduled(tenant)), Raw(topic, b"junk"), Raw(topic, scheduled("nobody-at-all")))
    mine, junk, stranger = (letter["id"] for letter in listed(run, topic))

    result = run("dead-letters", "retry", "--all", "--topic", topic, "--json", status=1)
    outcomes = {found["id"]: found for found in map(json.loads, result.stdout.splitlines())}
    assert outcomes[mine]["state"] == "retried"
    assert "drop it" in outcomes[junk]["error"]
    assert "nobody-at-all" in outcomes[stranger]["error"]
    assert {letter["id"]: letter["state"] for letter in listed(run, topic)} == {junk: "open", stranger: "open"}

    new_id = outcomes[mine]["request_id"]
    record, request = asyncio.run(found_request(kafka, "batch", new_id))
    assert (record.key, request.prompt_token_ids) == (tenant.encode(), (1, 2))
    grant = read_grant(grant_secret(tmp_path), dict(record.headers)[GRANT_HEADER])
    assert (grant.tenant, grant.tiers, grant.reply.topic) == (tenant, ("batch",), f"tokens.{tenant}")


def test_a_request_whose_record_has_no_key_needs_its_tenant(run: Run, kafka: KafkaSettings) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    run("tenants", "create", tenant)
    put_aside(kafka, Raw(requests_topic("interactive"), request_named(tenant), None))
    number = listed(run, requests_topic("interactive"))[-1]["id"]
    refused = run("dead-letters", "retry", str(number), "--json", status=1)
    assert "--tenant" in json.loads(refused.stdout)["error"]
    asked = json.loads(run("dead-letters", "retry", str(number), "--tenant", tenant, "--json").stdout)
    _, request = asyncio.run(found_request(kafka, "interactive", asked["request_id"]))
    assert request.user == tenant


def request_named(name: str) -> bytes:
    return encode(InferenceRequested("old", "m", messages=(Message("user", "hi"),), user=name))


async def found_request(kafka: KafkaSettings, tier: str, request_id: str) -> tuple[Any, InferenceRequested]:
    decoder, found = EventDecoder(kafka), list[tuple[Any, InferenceRequested]]()
    async for record in read_to_end(kafka, requests_topic(tier)):
        with suppress(HeadraceError):
            event = await decoder.decode(record.value)
            if isinstance(event, InferenceRequested) and event.request_id == request_id:
                found.append((record, event))
    (one,) = found
    return one


# --- what is kept by reference ------------------------------------------------------------------------------------------


MEGABYTES = "x" * 1_500_000


def keep(event: Stored, tenant: str, tmp_path: Path) -> PayloadStored:
    """Puts an event into the object store, as whoever wrote the record did."""

    async def work() -> PayloadStored:
        payloads = Payloads.of(ProcessSettings(data_dir=tmp_path))
        try:
            return await payloads.put(event, None, tenant)
        finally:
            await payloads.close()

    return asyncio.run(work())


def large_request(old_id: str) -> InferenceRequested:
    return InferenceRequested(old_id, "m", messages=(Message("user", MEGABYTES),), user="large")


def old_id() -> str:
    return request_id(0, secrets.token_bytes(10))


def whole(kafka: KafkaSettings, tier: str, new_id: str, tmp_path: Path) -> tuple[PayloadStored, InferenceRequested]:
    """What a request's record refers to, and the request."""

    async def work() -> tuple[PayloadStored, InferenceRequested]:
        payloads = Payloads.of(ProcessSettings(data_dir=tmp_path))
        decoder = EventDecoder(kafka, payloads)
        try:
            async for record in read_to_end(kafka, requests_topic(tier)):
                with suppress(HeadraceError):
                    reference = await decoder.decode_record(record.value)
                    if isinstance(reference, PayloadStored) and reference.request_id == new_id:
                        request = await decoder.follow(reference)
                        assert isinstance(request, InferenceRequested)
                        return reference, request
        finally:
            await payloads.close()
        raise AssertionError(f"nobody asked {new_id}")

    return asyncio.run(work())


def test_a_request_in_the_object_store_is_asked_again_under_a_new_id(
    run: Run, kafka: KafkaSettings, tmp_path: Path
) -> None:
    tenant, topic = f"t{secrets.token_hex(4)}", requests_topic("interactive")
    run("tenants", "create", tenant)
    kept = keep(large_request(old_id()), tenant, tmp_path)
    put_aside(kafka, Raw(topic, encode(kept), tenant.encode()))
    number = str(listed(run, topic)[-1]["id"])
    shown = json.loads(run("dead-letters", "show", number, "--json").stdout)
    assert (shown["stored"]["digest"], shown["event"]["user"]) == (kept.digest, "large")

    asked = json.loads(run("dead-letters", "retry", number, "--json").stdout)
    reference, request = whole(kafka, "interactive", asked["request_id"], tmp_path)
    assert asked["request_id"] != kept.request_id
    assert (reference.tenant, request.messages) == (tenant, (Message("user", MEGABYTES),))


def test_work_in_the_object_store_is_asked_again_with_its_token_ids(
    run: Run, kafka: KafkaSettings, topic: str, tmp_path: Path
) -> None:
    tenant, ids = f"t{secrets.token_hex(4)}", tuple(range(300_000))
    run("tenants", "create", tenant)
    reply = Reply(TOKENS, 3)
    work = InferenceScheduled(old_id(), tenant, "m", "1", "batch", ids, Sampling(), 10, 5, reply, "salt")
    put_aside(kafka, Raw(topic, encode(keep(work, tenant, tmp_path)), b"a partition"))
    (letter,) = listed(run, topic)
    asked = json.loads(run("dead-letters", "retry", str(letter["id"]), "--json").stdout)
    _, request = whole(kafka, "batch", asked["request_id"], tmp_path)
    assert (request.model, request.prompt_token_ids) == ("m", ids)


def test_a_request_whose_object_is_gone_or_another_tenants_is_not_asked_again(
    run: Run, kafka: KafkaSettings, tmp_path: Path
) -> None:
    tenant, owner, topic = f"t{secrets.token_hex(4)}", f"t{secrets.token_hex(4)}", requests_topic("batch")
    for name in (tenant, owner):
        run("tenants", "create", name)
    foreign, gone = keep(large_request(old_id()), owner, tmp_path), keep(large_request(old_id()), tenant, tmp_path)
    (tmp_path / DEFAULT_FOLDER / key_of(gone)).unlink()
    put_aside(kafka, *(Raw(topic, encode(kept), tenant.encode()) for kept in (foreign, gone)))
    theirs, lost = (str(letter["id"]) for letter in listed(run, topic)[-2:])

    result = run("dead-letters", "retry", theirs, lost, "--json", status=1)
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["state"], second["state"]) == ("open", "open")
    assert "another tenant's" in first["error"]
    assert "gone from the object store" in second["error"]
    assert "another tenant's" in run("dead-letters", "retry", lost, "--tenant", owner, "--json", status=1).stdout
