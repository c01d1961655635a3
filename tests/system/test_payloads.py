"""What is too large for a record goes by reference, both ways, on a stack whose object store is a real S3 server behind a proxy that fails it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.structs import RecordMetadata

from bridge.calls import new_request_id
from cli.models import register_versions, version_of
from infra import ports
from infra.broker import EmbeddedKafka
from infra.kafka import make_admin, make_consumer, partitions_of
from infra.log import EventProducer
from infra.models_file import ModelEntry
from schemas.events import InferenceAnswered, InferenceRequested, Message, PayloadStored
from schemas.payloads import claim, key_of
from schemas.topics import ANSWER_MAX_BYTES, GRANT_HEADER, REQUEST_MAX_BYTES, TOKENS, requests_topic
from tests import onnx_models
from tests.faulty import Fault, FaultyProxy, cut, flip, zero_fill
from tests.s3 import BUCKET, S3Server
from tests.system.asking import BOTH, CHAT, COMPLETIONS, STREAMED, Answer, body_of, call
from tests.system.fixtures_models import worker
from tests.system.running import MODEL, ROOT, RunningStack, script

pytestmark = pytest.mark.timeout(240)
PREFIX = "system"
PAYLOADS = f"{PREFIX}/payloads/"
LARGE_BYTES = 5_000_000
MEDIUM_BYTES = 1_500_000
CONTEXT = 9_000_000
FILLING = "filling"


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> FaultyProxy:
    return FaultyProxy(ports.free_port(), s3.port)


@pytest.fixture(scope="module")
def stack(s3: S3Server, proxy: FaultyProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack of its own: what is done to its store would harm others'."""
    env = {**s3.env, "HEADRACE_OBJECTS": f"s3://{BUCKET}/{PREFIX}", "HEADRACE_OBJECTS_ENDPOINT": proxy.endpoint}
    with EmbeddedKafka(tmp_path_factory.mktemp("payloads-kafka")) as broker:
        data_dir = tmp_path_factory.mktemp("payloads-data")
        running = RunningStack(broker.settings, data_dir, context_length=CONTEXT, extra_env=env)
        running.thread.run(proxy.start())
        try:
            running.start()
            yield running
        finally:
            running.thread.run(proxy.stop())
            running.close()


def objects(s3: S3Server) -> dict[str, int]:
    """The payloads there, by their size."""
    client = s3.client()
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=PAYLOADS)
        return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}
    finally:
        client.close()


def new_objects(s3: S3Server, before: dict[str, int], size: int) -> list[str]:
    """The payloads of about this size that came since; what a test before this one left behind may come meanwhile, too."""
    return [key for key, found in objects(s3).items() if key not in before and abs(found - size) < 1_000]


def large(said: str, pad_bytes: int = MEDIUM_BYTES) -> str:
    """A prompt of megabytes that directs a short answer."""
    return script(tokens=list(said), pad="x" * pad_bytes)


def assert_served(stack: RunningStack) -> None:
    answer = call(stack, CHAT, body_of(CHAT, "next"))
    assert (answer.status, answer.texts) == (200, {0: "next"})


@BOTH
@STREAMED
def test_a_prompt_of_megabytes_is_answered(stack: RunningStack, s3: S3Server, endpoint: str, stream: bool) -> None:
    before = objects(s3)
    answer = call(stack, endpoint, body_of(endpoint, large("short", LARGE_BYTES), stream=stream, stream_options=None))
    assert (answer.status, answer.texts, answer.ends) == (200, {0: "short"}, {0: "stop"})
    new = {key: size for key, size in objects(s3).items() if key not in before}
    work_bytes = (
        4 * LARGE_BYTES
    )  # a token id is a byte here; what a test before this one left behind may come meanwhile, too
    sizes = [size for size in new.values() if any(0 < size - least < 1_000 for least in (LARGE_BYTES, work_bytes))]
    assert len(sizes) == 2  # the request, and its work
    assert all(key.startswith(f"{PAYLOADS}acme/") for key in new)


@pytest.mark.parametrize("beyond", [-1, 0, 1, 12 * 1024 * 1024 - REQUEST_MAX_BYTES])
def test_the_request_limit_is_exact(stack: RunningStack, s3: S3Server, beyond: int) -> None:
    size = REQUEST_MAX_BYTES + beyond
    directed = body_of(COMPLETIONS, script(tokens=["ok"], pad="PAD"))
    spare = size - len(json.dumps(directed)) + len("PAD")
    raw = json.dumps(directed).replace("PAD", "x" * spare).encode()
    assert len(raw) == size
    before = objects(s3)
    answer = call(stack, COMPLETIONS, raw)
    if beyond <= 0:
        assert (answer.status, answer.texts) == (200, {0: "ok"})
    else:
        assert (answer.status, answer.error and answer.error["code"]) == (413, "payload_too_large")
        assert not new_objects(s3, before, size)
    assert_served(stack)


def test_what_the_log_holds_of_it_is_small_and_says_what_it_is(stack: RunningStack) -> None:
    request_id, _ = _whole(stack, body_of(CHAT, large("told")))
    stack.ended(request_id)
    asked = [read for read in stack.history(request_id) if read.topic.startswith(("requests.", "work."))]
    assert [read.name for read in asked] == ["InferenceRequested", "InferenceScheduled"]
    for read in asked:
        assert len(read.value or b"") < 2_000
        assert b"xxxx" not in (read.value or b"")
    told = json.loads(stack.command("explain", request_id, "--json").stdout)
    assert told["outcome"] == "completed"
    assert told["tokens"]["prompt"] > MEDIUM_BYTES


def _whole(stack: RunningStack, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    with stack.http() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text[:500]
    return response.headers["x-request-id"], response.json()


def test_an_answer_larger_than_a_record_is_kept_and_replayed(stack: RunningStack) -> None:
    text = "Ärger" * 200
    directions = script(tokens=[text], repeat=3)
    request_id, whole = _whole(stack, body_of(CHAT, directions, logprobs=True, top_logprobs=20))
    assert whole["choices"][0]["message"]["content"] == text * 3
    kept = stack.until(lambda: stack.events(request_id, "InferenceAnswered"))
    assert len(kept[0].value or b"") < 2_000
    stack.thread.run(_trim_tokens(stack))  # as retention does: only the answer is left
    with stack.http() as client:
        replayed = client.get(f"/v1/streams/{request_id}").text
        other = stack.http("other").get(f"/v1/streams/{request_id}")
    answer = Answer(200)
    for line in replayed.splitlines():
        if line.startswith("data: {"):
            answer.take(json.loads(line.removeprefix("data: ")))
    assert (answer.texts, answer.ends) == ({0: text * 3}, {0: whole["choices"][0]["finish_reason"]})
    assert other.status_code == httpx.codes.NOT_FOUND


async def _trim_tokens(stack: RunningStack) -> None:
    consumer, admin = make_consumer(stack.kafka), make_admin(stack.kafka)
    await consumer.start()
    await admin.start()
    places = [TopicPartition(TOKENS, number) for number in await partitions_of(consumer, TOKENS)]
    ends = await consumer.end_offsets(places)
    await admin.delete_records({place: RecordsToDelete(before_offset=end) for place, end in ends.items() if end})
    await consumer.stop()
    await admin.close()


@pytest.fixture(scope="module")
def filling(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model whose answer is as large as its small input says. Yields its name."""
    folder = onnx_models.filling(tmp_path_factory.mktemp("filling"))
    entry = ModelEntry(FILLING, "1", "onnx", str(folder), 512, slots=2, partitions=1)
    versions = [version_of(entry, stack.data_dir, lambda _text: None)]
    stack.thread.run(register_versions(stack.kafka, versions))
    with worker(stack, "filling-a", FILLING):
        yield FILLING


def filled(stack: RunningStack, model: str, size: int, *, binary: bool = True) -> httpx.Response:
    """So many bytes are asked for, in the protocol's binary form or as JSON."""
    inputs = [{"name": "count", "datatype": "INT64", "shape": [1], "data": [size]}]
    outputs = [{"name": "y", "parameters": {"binary_data": binary}}]
    return stack.http().post(f"/v2/models/{model}/infer", json={"inputs": inputs, "outputs": outputs})


@pytest.mark.parametrize("binary", [True, False])
def test_twelve_megabytes_of_output_pass_the_whole_path(stack: RunningStack, filling: str, binary: bool) -> None:
    """seldon-core#4668, #5125: a small input whose output is 12 MB."""
    size = 12 * 1024 * 1024
    answer = filled(stack, filling, size, binary=binary)
    assert answer.status_code == httpx.codes.OK, answer.text[:500]
    if binary:
        head = int(answer.headers["inference-header-content-length"])
        assert answer.content[head:] == b"\x07" * size
    else:
        assert answer.json()["outputs"][0]["data"] == [7] * size
    request_id = answer.headers["x-request-id"]
    kept = stack.until(lambda: stack.events(request_id, "InferenceAnswered"))
    assert all(len(read.value or b"") < 2_000 for read in [*kept, *stack.events(request_id, "InferenceCompleted")])


def test_the_output_limit_is_exact_and_more_is_an_error_at_once(stack: RunningStack, filling: str) -> None:
    for size in (ANSWER_MAX_BYTES - 1, ANSWER_MAX_BYTES):
        answer = filled(stack, filling, size)
        assert (answer.status_code, len(answer.content) > size) == (httpx.codes.OK, True)
    refused = filled(stack, filling, ANSWER_MAX_BYTES + 1)
    assert refused.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert "bytes" in refused.json()["error"]
    assert filled(stack, filling, 3, binary=False).json()["outputs"][0]["data"] == [7, 7, 7]


def test_a_store_that_is_away_for_seconds_is_waited_for(stack: RunningStack, proxy: FaultyProxy) -> None:
    stack.thread.run(proxy.stop())
    back = threading.Timer(4.0, lambda: stack.thread.run(proxy.start()))
    back.start()
    try:
        assert_served(stack)  # what is small needs no store
        answer = call(stack, CHAT, body_of(CHAT, large("waited")))
    finally:
        back.join()
    assert (answer.status, answer.texts) == (200, {0: "waited"})


def test_answers_that_are_cut_zeroed_or_flipped_on_their_way_are_asked_for_again(
    stack: RunningStack, proxy: FaultyProxy
) -> None:
    for fault in (cut, zero_fill, flip):
        proxy.faults.extend([fault, fault])
        answer = call(stack, CHAT, body_of(CHAT, large("again")))
        assert (answer.status, answer.texts) == (200, {0: "again"})
        assert not proxy.faults


def flip_ids(body: bytes) -> bytes:
    """Harms what admission wrote for the worker, and not the text that it read."""
    return body if b"xxxx" in body else flip(body)


@STREAMED
@pytest.mark.parametrize("harm", [flip, flip_ids])
def test_a_payload_that_is_harmed_fails_its_request_and_no_other(
    stack: RunningStack, proxy: FaultyProxy, stream: bool, harm: Fault
) -> None:
    """What admission reads first, or the worker then, comes with one bit flipped however often it is asked for."""
    proxy.always = harm
    try:
        answer = call(stack, CHAT, body_of(CHAT, large("harmed"), stream=stream))
    finally:
        proxy.always = None
    assert (answer.status, answer.error and answer.error["code"]) == (500, "payload_lost")
    assert_served(stack)
    assert call(stack, CHAT, body_of(CHAT, large("fine"), stream=stream)).texts == {0: "fine"}


def test_a_payload_that_is_gone_fails_its_request_and_no_other(stack: RunningStack, s3: S3Server) -> None:
    stack.pause("admission-interactive")
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(call(stack, CHAT, body_of(CHAT, large("gone")))))
    before, client = objects(s3), s3.client()
    asking.start()
    try:
        (key,) = stack.until(lambda: new_objects(s3, before, MEDIUM_BYTES))
        client.delete_object(Bucket=BUCKET, Key=key)
    finally:
        stack.resume("admission-interactive")
        client.close()
    asking.join()
    assert (answers[0].status, answers[0].error and answers[0].error["code"]) == (500, "payload_lost")
    assert_served(stack)


def test_a_direct_producer_asks_by_reference(stack: RunningStack, s3: S3Server, tmp_path: Path) -> None:
    grant = tmp_path / "grant.json"
    grant.write_text(stack.command("tenants", "grant", "other", "--json").stdout)
    argv = [sys.executable, str(ROOT / "docs/direct.py"), str(grant), MODEL, "-"]
    before = objects(s3)
    done = stack.run(argv, text=script(tokens=["di", "rect"], pad="x" * MEDIUM_BYTES))
    assert done.stdout.startswith("direct\n[InferenceCompleted"), done.stdout[:200]
    new = new_objects(s3, before, MEDIUM_BYTES)
    assert new
    assert all(key.startswith(f"{PAYLOADS}other/") for key in new)


def test_nobody_reads_another_tenants_payload(stack: RunningStack, s3: S3Server, tmp_path: Path) -> None:
    """Whoever knows, or guesses, the digest of another tenant's request gets nothing of it: it isn't even fetched."""
    call(stack, CHAT, body_of(CHAT, large("secret")))
    key, size = max(objects(s3).items(), key=lambda item: item[1])
    request_id = new_request_id()
    reference = PayloadStored(request_id, "acme", "InferenceRequested", key.rsplit("/", 1)[1], size)
    given = json.loads(stack.command("tenants", "grant", "other", "--json").stdout)
    stack.thread.run(_send(stack, reference, "batch", given["tenant"], given["grant"]))
    refused = stack.ended(request_id)
    assert refused.facts["outcome"] == "rejected"
    assert refused.facts["reason"] == "permission_denied"


async def _send(
    stack: RunningStack, reference: PayloadStored, tier: str, key: str, grant: str | None = None
) -> RecordMetadata:
    producer = EventProducer(stack.kafka, "payload-tests")
    await producer.start()
    headers = [] if grant is None else [(GRANT_HEADER, grant.encode())]
    sent = await producer.send_and_wait(requests_topic(tier), reference, key=key, headers=headers)
    await producer.stop()
    return sent


def test_a_large_request_that_was_put_aside_is_asked_again(stack: RunningStack, s3: S3Server) -> None:
    """It came without a grant. What its object holds is of its own id, so what is asked again has another object."""
    before, client = objects(s3).keys(), s3.client()
    asked = InferenceRequested(new_request_id(), MODEL, messages=(Message("user", large("at last")),))
    reference, content = claim(asked, None, "acme", "avro")
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{key_of(reference)}", Body=content)
    place = stack.thread.run(_send(stack, reference, "interactive", "acme"))

    def put_aside() -> str | None:
        listed = stack.command("dead-letters", "list", "--topic", place.topic, "--json").stdout.splitlines()
        letters = {(found["partition"], found["offset"]): str(found["id"]) for found in map(json.loads, listed)}
        return letters.get((place.partition, place.offset))

    number = stack.until(put_aside)
    again = json.loads(stack.command("dead-letters", "retry", number, "--json").stdout)["request_id"]
    (answer,) = stack.until(lambda: stack.events(again, "InferenceAnswered"))
    assert isinstance(answer.event, InferenceAnswered)
    assert [choice.text for choice in answer.event.choices] == ["at last"]
    new = [client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in objects(s3).keys() - before]
    client.close()
    assert [asked.request_id.encode() in stored for stored in new].count(True) == 1
    assert [again.encode() in stored for stored in new].count(True) == 2  # as it was asked again, and its work
