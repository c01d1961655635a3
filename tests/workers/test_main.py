"""How a worker starts: it waits for its version, and says what is wrong with one that it can't serve."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.log import EventProducer
from infra.settings import KafkaSettings, WorkerSettings
from infra.topics import ensure_model
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.topics import REGISTRY
from tests.workers.lane import Lane
from workers.engines.choice import make_engine, resolved
from workers.main import run


def version(**changes: Any) -> ModelVersionRegistered:
    made = ModelVersionRegistered(
        f"m-{secrets.token_hex(4)}", "1", "scripted", "scripted", 1_000, partitions=1, tiers=("interactive",)
    )
    return replace(made, **changes)


async def test_it_waits_until_its_version_is_registered(kafka: KafkaSettings) -> None:
    registered, stop = version(), asyncio.Event()
    task = asyncio.create_task(run(WorkerSettings(kafka=kafka), registered.model, "1", stop))
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        await asyncio.sleep(0.5)
        assert not task.done()
        await producer.send_and_wait(REGISTRY, registered, key=registered.model)
        await ensure_model(kafka, registered)
        lane = Lane(kafka, producer, registered)
        (read,) = await lane.until_closed(await lane.ask("hello"))
    finally:
        stop.set()
        await task
        await producer.stop()
    assert read.text == "hello"


async def test_it_stops_while_it_waits(kafka: KafkaSettings) -> None:
    stop = asyncio.Event()
    task = asyncio.create_task(run(WorkerSettings(kafka=kafka), "nobody-registers-this", "1", stop))
    await asyncio.sleep(0.3)
    stop.set()
    await asyncio.wait_for(task, 20)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"engine": "abacus"}, "engine"),
        ({"engine_args": "[]"}, "engine_args"),
        ({"engine_args": "{"}, "engine_args"),
        ({"engine_args": '{"dtype": "float32"}'}, "engine_args.dtype"),
        ({"engine": "vllm", "engine_args": '{"model": "other"}'}, "engine_args.model"),
        ({"engine": "vllm", "engine_args": '{"max_model_len": 5}'}, "engine_args.max_model_len"),
    ],
)
def test_an_engine_that_cannot_be_made_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(HeadraceError) as found:
        make_engine(version(**changes), 1)
    assert found.value.param == param


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="nowhere"):
        resolved(version(engine="vllm", artifact=str(tmp_path / "nowhere")), tmp_path)


def test_the_folder_of_the_weights_has_the_tokenizer_too(tmp_path: Path) -> None:
    found = resolved(version(engine="vllm", artifact=str(tmp_path)), tmp_path)
    assert found.artifact == found.tokenizer == str(tmp_path.resolve())
