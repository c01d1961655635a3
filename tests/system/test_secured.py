"""A cluster with TLS, sign-in and ACLs: every process works as its own user, and none may do another's part."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError

from cli.registry import DEFAULT_TIERS, now_ms
from infra.grants import Grant, mint
from infra.kafka import make_admin, make_consumer, make_producer
from infra.models_file import ModelEntry
from infra.settings import KafkaSettings, grant_secret
from infra.topics import ensure_tenant
from schemas.events import Reply
from tests.system.asking import COMPLETIONS, body_of, call
from tests.system.running import MODEL, ROOT, TENANTS, RunningStack
from tests.system.secured import PLAIN, SCRAM, Authority, SecuredKafka, with_password

pytestmark = [pytest.mark.timeout(240), pytest.mark.kafka]

WAIT_S = 30.0
PROCESSES = {
    "bridge": ("bridge", "--port", "0"),
    "admission": ("streams", "admission"),
    "endings": ("streams", "endings"),
    "lifecycle": ("streams", "lifecycle"),
    "worker": ("worker", MODEL, "1"),
    "operator": ("topics", "list"),
}
SERVING = ("worker", "admission", "endings", "lifecycle", "bridge")
BY_CERTIFICATE = ("worker", "admission")
"""One on aiokafka and one on Faust, in a second round."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """The broker, with the printed ACLs in force."""
    kafka = SecuredKafka(tmp_path_factory.mktemp("secured"), TENANTS)
    with kafka.broker:
        assert asyncio.run(kafka.allow()) > len(PROCESSES)
        yield kafka


@pytest.fixture(scope="module")
def stack(secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """One process of each kind, each its own user. The operator made topics, tenants and the model."""
    running = RunningStack(secured.settings("operator"), tmp_path_factory.mktemp("secured-data"))
    try:
        grant_secret(running.data_dir)
        running.thread.run(running._prepare(ModelEntry(MODEL, "1", "scripted", "scripted", 4096, slots=4)))
        for tenant in TENANTS:
            running.thread.run(ensure_tenant(running.kafka, tenant))
        for name in SERVING:
            add(running, name, secured.settings(name))
        for name in SERVING:
            running.await_ready(name)
        yield running
    finally:
        running.close()


def add(stack: RunningStack, name: str, kafka: KafkaSettings, *arguments: str) -> None:
    if not arguments:
        arguments = PROCESSES[name] if name != "bridge" else ("bridge", "--port", str(stack.port))
    unset = dict.fromkeys(stack.kafka.to_env(), "")
    stack.add(name, *arguments, **{**unset, **kafka.to_env()})


def ask(stack: RunningStack, content: str) -> str:
    answer = stack.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
    stack.ended(answer.id.split("-", 1)[1])
    return answer.choices[0].message.content or ""


def files_that_tell(secrets: dict[str, str], folder: Path) -> list[tuple[Path, str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [(path, user) for path in files for user, secret in secrets.items() if secret.encode() in path.read_bytes()]


def test_a_chat_is_answered_by_processes_that_may_do_no_more_than_their_part(
    stack: RunningStack, secured: SecuredKafka
) -> None:
    assert ask(stack, "Hello, wörld") == "Hello, wörld"
    tail = stack.command("topics", "tail", "answers", "--from", "beginning", "--no-follow", "--json")
    assert "InferenceAnswered" in tail.stdout
    stack.pause("worker")
    try:
        late = call(stack, COMPLETIONS, body_of(COMPLETIONS, "hello", timeout=1))
    finally:
        stack.resume("worker")
    assert (late.status, late.error and late.error["code"]) == (504, "deadline_exceeded")
    for name in BY_CERTIFICATE:
        stack.remove(name)
        add(stack, name, secured.mutual(name))
    for name in BY_CERTIFICATE:
        stack.await_ready(name)
    assert ask(stack, "By certificate") == "By certificate"
    assert (stack.data_dir / "logs" / "worker.log").stat().st_size
    assert files_that_tell(secured.passwords, stack.data_dir) == []


async def test_a_direct_producer_asks_and_reads_its_own_answer(stack: RunningStack, secured: SecuredKafka) -> None:
    settings = secured.settings("tenant-acme")
    key_id = stack.keys["acme"].split("-")[1]
    reply = Reply("tokens.acme", 0, "json")
    token = mint(grant_secret(stack.data_dir), Grant("acme", key_id, DEFAULT_TIERS, reply, now_ms() + 60_000))
    request: dict[str, Any] = {
        "type": "InferenceRequested",
        "request_id": request_id(),
        "model": MODEL,
        "sampling": {"max_tokens": 32},
    }
    request["messages"] = [{"role": "user", "content": "Directly"}]
    consumer, producer = make_consumer(settings), make_producer(settings)
    await consumer.start()
    await producer.start()
    try:
        own = TopicPartition("tokens.acme", 0)
        consumer.assign([own])
        await consumer.seek_to_end(own)
        headers = [("grant", token.encode())]
        await producer.send_and_wait("requests.interactive", json.dumps(request).encode(), b"acme", headers=headers)
        text = ""
        async with asyncio.timeout(WAIT_S):
            async for record in consumer:
                event = json.loads(record.value)
                assert event["request_id"] == request["request_id"]
                text += event.get("text") or "".join(choice["text"] for choice in event.get("choices", ()))
                if event["type"].startswith("Inference"):
                    assert event["type"] == "InferenceCompleted", event
                    break
        assert text == "Directly"
    finally:
        await producer.stop()
        await consumer.stop()


@pytest.fixture(scope="module")
def batch(stack: RunningStack, secured: SecuredKafka) -> Iterator[None]:
    """Admission of the tier that direct producers write to by themselves."""
    name = "admission-batch"
    add(stack, name, secured.settings("admission"), "streams", "admission", "--tier", "batch")
    stack.await_ready(name)
    yield
    stack.remove(name)


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("way", [SCRAM, PLAIN, "certificate"])
def test_the_documented_direct_producer_signs_in_by_the_same_variables(
    stack: RunningStack, secured: SecuredKafka, tmp_path: Path, way: str
) -> None:
    grant = tmp_path / "grant.json"
    grant.write_text(stack.command("tenants", "grant", "acme", "--json").stdout)
    settings = secured.mutual("tenant-acme") if way == "certificate" else secured.settings("tenant-acme", way)
    env = {**clean_environment(), **settings.to_env()}
    if way != SCRAM:
        del env["HEADRACE_KAFKA_SECURITY"], env["HEADRACE_KAFKA_SASL_MECHANISM"]  # guessed as the processes guess
    argv = [sys.executable, str(ROOT / "docs/direct.py"), str(grant), MODEL, "Dírectly"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout.startswith("Dírectly\n[InferenceCompleted"), (done.stdout, done.stderr)


def request_id() -> str:
    number = now_ms() << 80 | uuid.uuid4().int & ((1 << 80) - 1)
    return str(uuid.UUID(int=number & ~(0xF << 76 | 0x3 << 62) | 7 << 76 | 2 << 62))


@pytest.mark.parametrize("way", [SCRAM, PLAIN, "certificate"])
@pytest.mark.parametrize(
    ("role", "topic"),
    [
        ("worker", "requests.interactive"),
        ("worker", "answers"),
        ("bridge", "work.scripted.1.interactive"),
        ("bridge", "tokens"),
        ("endings", "tenants"),
        ("endings", "ledger.interactive"),
        ("operator", "ledger.interactive"),
        ("admission", "answers"),
        ("tenant-acme", "tokens.acme"),
        ("tenant-acme", "tenants"),
    ],
)
async def test_nobody_writes_what_is_anothers(
    stack: RunningStack, secured: SecuredKafka, role: str, topic: str, way: str
) -> None:
    producer = make_producer(secured.mutual(role) if way == "certificate" else secured.settings(role, way))
    await producer.start()
    try:
        with pytest.raises(TopicAuthorizationFailedError):
            await asyncio.wait_for(producer.send_and_wait(topic, b"forged"), WAIT_S)
    finally:
        await producer.stop()


async def test_a_direct_producer_reads_nobody_elses_records(stack: RunningStack, secured: SecuredKafka) -> None:
    hidden = [
        "tokens.other",
        "tokens",
        "answers",
        "lifecycle",
        "ledger.interactive",
        "tenants",
        "work.scripted.1.interactive",
    ]
    settings = secured.settings("tenant-acme")
    admin, consumer = make_admin(settings), make_consumer(settings)
    await admin.start()
    await consumer.start()
    try:
        found = await admin.describe_topics(["tokens.acme", *hidden])
        told = {topic["topic"]: topic["error_code"] for topic in found}
        assert told == {"tokens.acme": 0, **dict.fromkeys(hidden, TopicAuthorizationFailedError.errno)}
        written = TopicPartition("requests.interactive", 0)  # may be written, so its partitions are known
        consumer.assign([written])
        consumer.seek(written, 0)
        with pytest.raises(TopicAuthorizationFailedError):
            await asyncio.wait_for(consumer.getone(), WAIT_S)
    finally:
        await consumer.stop()
        await admin.close()


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_KAFKA")}


def run_all(settings: dict[str, KafkaSettings], data_dir: Path) -> dict[str, Any]:
    """Each process with its settings, all at once: exit status and all it wrote."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "cli.main", *PROCESSES[name]],
            cwd=ROOT,
            env={**clean_environment(), **kafka.to_env(), "HEADRACE_DATA": str(data_dir), "HEADRACE_OPS_PORT": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, kafka in settings.items()
    }
    try:
        return {name: (process.communicate(timeout=60)[0], process.returncode) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()


def test_a_wrong_password_ends_every_process_with_clear_words(secured: SecuredKafka, tmp_path: Path) -> None:
    wrong = "not-the-password-" + uuid.uuid4().hex
    ways = {name: PLAIN if name in ("endings", "operator") else SCRAM for name in PROCESSES}
    settings = {name: with_password(secured.settings(name, way), wrong) for name, way in ways.items()}
    for name, (written, status) in run_all(settings, tmp_path).items():
        assert status == 1, (name, written)
        assert f"refused 'headrace-{name}' by {ways[name]}" in written, (name, written)
        assert wrong not in written
        assert "Traceback" not in written, (name, written)
    assert files_that_tell({"wrong": wrong}, tmp_path) == []


def test_a_cluster_that_another_authority_vouches_for_is_not_trusted(secured: SecuredKafka, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "another authority")
    settings = {
        name: dataclasses.replace(secured.settings(name), ssl_cafile=str(other.file)) for name in ("worker", "operator")
    }
    for name, (written, status) in run_all(settings, tmp_path).items():
        assert status == 1, (name, written)
        assert "shows a certificate that HEADRACE_KAFKA_CAFILE doesn't vouch for" in written, (name, written)
        assert secured.passwords[f"headrace-{name}"] not in written
        assert "Traceback" not in written, (name, written)


def test_a_client_without_certificate_or_tls_is_told_so(secured: SecuredKafka, tmp_path: Path) -> None:
    settings = {
        "operator": dataclasses.replace(secured.mutual("operator"), ssl_certfile=None, ssl_keyfile=None),
        "endings": KafkaSettings(secured.settings("endings").bootstrap),
    }
    for name, (written, status) in run_all(settings, tmp_path).items():
        assert status == 1, (name, written)
        told = ("fails to speak TLS", f"answers, but not in {settings[name].security_protocol}")
        assert any(words in written for words in told), (name, written)
        assert "Traceback" not in written, (name, written)
