"""Small models on the whole path, by their callers' own clients: values, datatypes, and the rules of every request."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from openai import OpenAI
from rich.console import Console

from cli.demo import TEXTS as DEMO_TEXTS
from cli.demo import show_small
from schemas.events import InferenceCompleted, InferenceFailed
from schemas.topics import LIFECYCLE
from tests.onnx_models import EXTREMES, ONNX_TYPES, RANKS
from tests.system.direct_onnx import direct_classes, direct_scores, direct_vectors
from tests.system.fixtures_small import BRAIN, EVERYTHING, GRADES, MAGIKA, MINILM, NAMES, TYPED, SmallModels
from tests.system.running import RunningStack
from tests.system.small_calls import (
    JSON,
    KSERVE_GRPC,
    KSERVE_JSON,
    KSERVE_REST,
    KSERVES,
    TRITON_JSON,
    TRITONS,
    TYPED_GRPC,
    Ask,
    asked,
    kserves,
)
from tests.system.small_door import async_door, door, tensor
from tests.system.test_cache import metric
from text.tokenizer import load_tokenizer
from workers.engines.arrays import DTYPES

TEXTS = ("A cat sits on the mat.", "The headrace leads water to the turbine. " * 8, "short")
FILES = (
    "import os\n\nfor name in os.listdir():\n    print(name)\n" * 4,
    '{"a": [1, 2, 3], "b": null}\n' * 9,
    "select * from t;\n" * 20,
)
TOLERANCE = 1e-5


def texts_of(values: Any) -> Any:
    """Texts as BYTES."""
    return np.array([each.encode() for each in values], dtype=object)


EMBED = Ask(MINILM, {"text": ("BYTES", texts_of(TEXTS))}, ["embedding"])
CLASSIFY = Ask(MAGIKA, {"bytes": ("BYTES", texts_of(FILES))}, ["label", "score"])


def extremes(model: str, *kinds: str, infinite: bool = True) -> Ask:
    """Each of these datatypes in each rank, with what is hard of it; NaN for infinity if that can't be said."""
    given: dict[str, tuple[str, Any]] = {}
    for kind in kinds:
        for rank in range(RANKS):
            shape = (2, 3, 1, 2)[:rank]
            values = [EXTREMES[kind][index % 2] for index in range(int(np.prod(shape)))]
            raw = texts_of(values) if kind == "BYTES" else np.array(values, DTYPES[kind])
            if not infinite and raw.dtype.kind == "f":
                raw[np.isinf(raw)] = np.nan
            array = raw.reshape(shape)
            given[f"{kind.lower()}_{rank}"] = (kind, array.view(ml_dtypes.bfloat16) if kind == "BF16" else array)
    return Ask(model, given, [f"{name}_back" for name in given])


WITH_FIELDS = [kind for kind in ONNX_TYPES if kind not in {"BF16", "FP16"}]
ALL = extremes(EVERYTHING, *WITH_FIELDS, "FP16")
BF16 = extremes(BRAIN, "BF16")
ALL_TYPED = extremes(TYPED, *WITH_FIELDS)
KSERVE_ALL = [(KSERVE_REST, ALL), (KSERVE_GRPC, ALL), (KSERVE_JSON, extremes(TYPED, *WITH_FIELDS, infinite=False))]
"""By how it is asked. In JSON it has no FP16, and no infinity that it tells from NaN; and BF16 it doesn't know."""


@pytest.fixture(scope="module")
def vectors(minilm_dir: Path) -> Any:
    """MiniLM's of the texts, each by itself, by ONNX Runtime called directly."""
    return direct_vectors(minilm_dir, TEXTS)


@pytest.fixture(scope="module")
def scores(magika_dir: Path) -> list[dict[str, float]]:
    """Magika's of the files, by label: of its package's own features, by ONNX Runtime called directly."""
    return direct_scores(magika_dir, [content.encode() for content in FILES])


@pytest.fixture(scope="module")
def kserve(stack: RunningStack, small: SmallModels) -> dict[tuple[str, str], dict[str, Any]]:
    """What KServe's client got, by how it asked and of which model."""
    asks = [(how, ask) for how in KSERVES for ask in (EMBED, CLASSIFY)]
    asks += KSERVE_ALL
    found = kserves(small, stack.keys["acme"], asks)
    return {(how, ask.model): answer for (how, ask), answer in zip(asks, found, strict=True)}


# --- values ------------------------------------------------------------------------------------------------------------


def check_scores(labels: Any, found: Any, scores: list[dict[str, float]]) -> None:
    """All labels of each file, the best first, with ONNX Runtime's own scores."""
    for names, row, wanted in zip(labels, found, scores, strict=True):
        told = {
            name if isinstance(name, str) else name.decode(): float(score)
            for name, score in zip(names, row, strict=True)
        }
        assert told.keys() == wanted.keys()
        assert max(abs(told[name] - wanted[name]) for name in wanted) < TOLERANCE
        assert next(iter(told)) == max(wanted, key=lambda name: wanted[name])


def check_same(ask: Ask, found: dict[str, Any], *, exact: bool) -> None:
    """What came back is what was sent: bit by bit, or, in JSON, value by value."""
    for name, (datatype, sent) in ask.inputs.items():
        back = found[f"{name}_back"]
        assert back.shape == sent.shape, name
        if datatype == "BYTES":
            assert [each if isinstance(each, bytes) else each.encode() for each in back.ravel()] == list(sent.ravel())
        elif exact:
            assert (back.dtype, back.tobytes()) == (sent.dtype, sent.tobytes()), name
        else:
            np.testing.assert_array_equal(back, sent)


@pytest.mark.parametrize("client", TRITONS)
def test_tritons_clients_get_the_values_of_onnx_runtime(
    stack: RunningStack, small: SmallModels, vectors: Any, scores: list[dict[str, float]], client: str
) -> None:
    embedded = asked(small, stack.keys["acme"], client, EMBED)
    np.testing.assert_allclose(embedded["embedding"], vectors, rtol=0, atol=TOLERANCE)
    classified = asked(small, stack.keys["acme"], client, CLASSIFY)
    check_scores(classified["label"], classified["score"], scores)


@pytest.mark.parametrize("how", KSERVES)
def test_kserves_clients_get_the_values_of_onnx_runtime(
    kserve: dict[tuple[str, str], dict[str, Any]], vectors: Any, scores: list[dict[str, float]], how: str
) -> None:
    np.testing.assert_allclose(kserve[how, MINILM]["embedding"], vectors, rtol=0, atol=TOLERANCE)
    check_scores(kserve[how, MAGIKA]["label"], kserve[how, MAGIKA]["score"], scores)


def test_openais_client_gets_the_values_of_onnx_runtime(
    stack: RunningStack, small: SmallModels, vectors: Any, scores: list[dict[str, float]]
) -> None:
    with OpenAI(base_url=f"{small.url}/v1", api_key=stack.keys["acme"], max_retries=0) as client:
        for form in ("float", "base64"):
            found = client.embeddings.create(model=MINILM, input=list(TEXTS), encoding_format=form)
            raw = [item.embedding for item in found.data]
            rows = [np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row for row in raw]
            np.testing.assert_allclose(np.array(rows), vectors, rtol=0, atol=TOLERANCE)
        assert found.usage.prompt_tokens > len(TEXTS)
        body = {"model": MAGIKA, "input": list(FILES), "top_k": 1_000}
        classes = [
            item["classes"] for item in client.post("/classifications", body=body, cast_to=dict[str, Any])["data"]
        ]
    labels = [[each["label"] for each in row] for row in classes]
    check_scores(labels, [[each["score"] for each in row] for row in classes], scores)


def test_a_text_classifier_gives_as_many_labels_as_are_asked_for_the_best_first(
    stack: RunningStack, small: SmallModels
) -> None:
    """Of texts, and of their token ids."""
    (folder,) = (Path(entry.artifact) for entry in small.entries if entry.name == GRADES)
    wanted = [
        sorted(scores.items(), key=lambda item: item[1], reverse=True) for scores in direct_classes(folder, TEXTS)
    ]
    assert len({best for (best, _), *_ in wanted}) > 1
    with door(stack, small) as client:
        for given in (list(TEXTS), tokens_of(folder)):
            for count in (1, 2, len(NAMES), 1_000):
                body = {"model": GRADES, "input": given, "top_k": count}
                answer = client.post("/v1/classifications", json=body).json()
                for item, classes in zip(answer["data"], wanted, strict=True):
                    labels, scores = zip(*classes[:count], strict=True)
                    assert tuple(each["label"] for each in item["classes"]) == labels
                    assert [each["score"] for each in item["classes"]] == pytest.approx(scores, rel=0, abs=TOLERANCE)
                    assert (item["label"], item["score"]) == tuple(item["classes"][0].values())
    way = ("--url", small.url, "--key", stack.keys["acme"], "--json")
    lines = stack.command("classify", GRADES, *(word for text in TEXTS for word in ("--text", text)), *way).stdout
    assert [json.loads(line)["label"] for line in lines.splitlines()] == [best for (best, _), *_ in wanted]


def tokens_of(folder: Path) -> list[list[int]]:
    """Of the texts, as a model's own tokenizer has them."""
    tokenizer = load_tokenizer(str(folder))
    return [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]


def test_token_ids_have_the_embedding_of_their_text(
    stack: RunningStack, small: SmallModels, minilm_dir: Path, vectors: Any
) -> None:
    """One text's, and several texts'."""
    ids = tokens_of(minilm_dir)
    with OpenAI(base_url=f"{small.url}/v1", api_key=stack.keys["acme"], max_retries=0) as client:
        whole = client.embeddings.create(model=MINILM, input=ids, encoding_format="float")
        alone = [client.embeddings.create(model=MINILM, input=each, encoding_format="float") for each in ids]
    assert [item.index for item in whole.data] == list(range(len(TEXTS)))
    for found in (whole.data, [item for answer in alone for item in answer.data]):
        np.testing.assert_allclose(np.array([item.embedding for item in found]), vectors, rtol=0, atol=TOLERANCE)
    lengths = [len(each) for each in ids]
    assert (whole.usage.prompt_tokens, [each.usage.prompt_tokens for each in alone]) == (sum(lengths), lengths)


def test_whatever_shares_their_batch(stack: RunningStack, small: SmallModels, vectors: Any) -> None:
    """Each call has a text of its own beside the known one, or the response cache would answer."""

    def embed(number: int) -> float:
        index = number % len(TEXTS)
        ask = Ask(MINILM, {"text": ("BYTES", texts_of((TEXTS[index], f"beside {number}")))}, ["embedding"])
        found = asked(small, stack.keys["acme"], TRITONS[number % len(TRITONS)], ask)
        return float(np.abs(found["embedding"][0] - vectors[index]).max())

    def rows() -> tuple[float, float]:
        """By request, the rows of the runs that they were part of, and the requests."""
        sum_of, count = (metric(stack, f"{MINILM}-a", f"headrace_batch_rows_{what}") for what in ("sum", "count"))
        return sum_of, count

    before = rows()
    with ThreadPoolExecutor(12) as callers:
        assert max(callers.map(embed, range(48))) < TOLERANCE
    after = rows()
    assert after[1] - before[1] == 48
    assert after[0] - before[0] > 2 * 48, "some had others in their run"


@pytest.mark.parametrize("client", [*TRITONS, JSON, TYPED_GRPC])
def test_every_datatype_and_rank_comes_back(stack: RunningStack, small: SmallModels, client: str) -> None:
    """Of NaN every bit where it is binary, and "NaN", "Infinity" and "-Infinity" in JSON."""
    whole, text = ALL_TYPED if client == TYPED_GRPC else ALL, client in {TRITON_JSON, JSON}
    check_same(whole, asked(small, stack.keys["acme"], client, whole), exact=not text)
    if not text and client != TYPED_GRPC:  # in which BF16 has no form
        check_same(BF16, asked(small, stack.keys["acme"], client, BF16), exact=True)


@pytest.mark.parametrize(("how", "ask"), KSERVE_ALL, ids=[how for how, _ in KSERVE_ALL])
def test_every_datatype_and_rank_comes_back_to_kserves_clients(
    kserve: dict[tuple[str, str], dict[str, Any]], how: str, ask: Ask
) -> None:
    check_same(ask, kserve[how, ask.model], exact=how != KSERVE_JSON)


def test_the_command_line_embeds_and_classifies(
    stack: RunningStack, small: SmallModels, vectors: Any, tmp_path: Path
) -> None:
    way = ("--url", small.url, "--key", stack.keys["acme"], "--json")
    lines = stack.command("embed", MINILM, *TEXTS, *way).stdout.splitlines()
    found = np.array([json.loads(line)["embedding"] for line in lines])
    assert np.abs(found - vectors).max() < TOLERANCE
    (program := tmp_path / "list.py").write_text(FILES[0])
    (line,) = stack.command("classify", MAGIKA, str(program), *way).stdout.splitlines()
    assert json.loads(line)["label"] == "python"


async def test_the_demo_shows_an_embedding_and_a_classification(stack: RunningStack, small: SmallModels) -> None:
    out = io.StringIO()
    played: Any = SimpleNamespace(
        url=small.url, key=stack.keys["acme"], options=SimpleNamespace(models=tuple(small.entries))
    )
    await show_small(played, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert f"How like “{DEMO_TEXTS[0]}” is …" in lines
    alike = [float(line.rsplit(" ", 1)[1]) for text in DEMO_TEXTS[1:] for line in lines if f"“{text}”: " in line]
    assert len(alike) == len(DEMO_TEXTS) - 1
    assert alike[0] > alike[1], "what means nearly the same is nearer"
    assert f"{MINILM}: {len(DEMO_TEXTS)} embeddings of 384 numbers" in lines
    best = lines[lines.index("What is demo.py?") + 1].split(": ")
    assert best[0].strip() == "python"
    assert float(best[1]) > 0.5


# --- the rules of every request ----------------------------------------------------------------------------------------


async def test_a_killed_worker_costs_a_pause(stack: RunningStack, small: SmallModels) -> None:
    name = f"{MAGIKA}-a"
    before = stack.pid(name)
    async with async_door(stack, small) as client:

        async def ask(number: int) -> httpx.Response:
            return await client.post("/v1/classifications", json={"model": MAGIKA, "input": f"text {number} " * 40})

        calls = [asyncio.create_task(ask(number)) for number in range(24)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        stack.kill(name)
        answers = await asyncio.gather(*calls)
    stack.until_restarted(name, before)
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        stack.ended(answer.headers["x-request-id"])
        endings = [
            read.event
            for read in stack.history(answer.headers["x-request-id"])
            if read.topic == LIFECYCLE and isinstance(read.event, InferenceCompleted | InferenceFailed)
        ]
        assert {type(ending) for ending in endings} == {InferenceCompleted}


def test_tokens_of_texts_are_charged_and_equal_ones_come_from_the_cache(
    stack: RunningStack, small: SmallModels
) -> None:
    body = {"model": MINILM, "input": f"{time.time()} " * 3}
    with door(stack, small) as client:
        first = client.post("/v1/embeddings", json=body)
        stack.ended(first.headers["x-request-id"])

        def hit() -> httpx.Response | None:
            found = client.post("/v1/embeddings", json=body)
            return found if found.headers.get("x-headrace-cache", "").startswith("hit") else None

        again: httpx.Response = stack.until(hit)
    assert again.json()["data"] == first.json()["data"]
    (ending,) = [
        read.event
        for read in stack.history(first.headers["x-request-id"])
        if read.topic == LIFECYCLE and isinstance(read.event, InferenceCompleted)
    ]
    assert ending.usage.prompt_tokens == first.json()["usage"]["prompt_tokens"] > 0
    assert ending.outputs == ()


def test_a_prompt_for_a_tensor_model_and_tensors_for_a_prompts_are_refused(
    stack: RunningStack, small: SmallModels
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with door(stack, small) as client:
        chat = client.post("/v1/chat/completions", json={"model": MINILM, "messages": messages})
        infer = client.post("/v2/models/scripted/infer", json={"inputs": [tensor("turns", "INT64", [1, 1], [1])]})
    assert chat.status_code == 400
    assert "takes tensors" in chat.json()["error"]["message"]
    assert infer.status_code == 400


def test_explain_tells_of_tensors_and_not_of_their_contents(stack: RunningStack, small: SmallModels) -> None:
    with door(stack, small) as client:
        answer = client.post("/v1/embeddings", json={"model": MINILM, "input": "secret words"})
    request_id = answer.headers["x-request-id"]
    stack.ended(request_id)
    told = stack.command("explain", request_id).stdout
    assert "token_ids INT32" in told
    assert "embedding FP32[1, 384]" in told
    assert "secret" not in told
