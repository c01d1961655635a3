from __future__ import annotations

import os

import pytest

from bench.hops import HOPS, Hops
from bench.load import Sample, now_s
from infra.log import EventProducer
from infra.settings import KafkaSettings
from infra.topics import ensure_model
from schemas.errors import HeadraceError
from schemas.events import (
    Attempt,
    Event,
    GenerationStarted,
    InferenceRequested,
    InferenceScheduled,
    ModelVersionRegistered,
    Reply,
    Sampling,
    TokensGenerated,
)
from schemas.ids import request_id as make_id
from schemas.topics import INTERACTIVE, TOKENS, requests_topic, work_topic


def new_request_id() -> str:
    return make_id(int(now_s() * 1000), os.urandom(10))


MODEL = ModelVersionRegistered("bench-hops", "1", "scripted", "scripted", 100)
WORK = work_topic(MODEL.model, MODEL.version, INTERACTIVE)


def events(request_id: str) -> list[tuple[str, Event]]:
    scheduled = InferenceScheduled(
        request_id, "bench", MODEL.model, "1", INTERACTIVE, (1,), Sampling(), 1, 1, Reply(TOKENS, 0), ""
    )
    started = GenerationStarted(request_id, "bench", MODEL.model, "1", INTERACTIVE, Attempt(1, 1), (0,), 1, "w")
    tokens = TokensGenerated(request_id, 0, Attempt(1, 1), 0, (1,), "a")
    return [
        (requests_topic(INTERACTIVE), InferenceRequested(request_id, MODEL.model)),
        (WORK, scheduled),
        (TOKENS, started),
        (TOKENS, tokens),
    ]


@pytest.mark.kafka
async def test_hops_add_up_to_what_the_caller_saw(kafka: KafkaSettings) -> None:
    await ensure_model(kafka, MODEL)
    hops = Hops(kafka, (WORK,))
    request_id = new_request_id()
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        await producer.send_and_wait(TOKENS, TokensGenerated(request_id, 0, Attempt(0, 0), 0, (1,), ""), partition=0)
        await hops.begin()  # what was there before doesn't count
        sample = Sample(now_s(), request_id=f"chatcmpl-{request_id}")
        for topic, event in events(request_id):
            await producer.send_and_wait(topic, event, key=request_id)
        sample.first_s = now_s()
    finally:
        await producer.stop()

    means = await hops.mean_ms([sample])

    assert len(means) == len(HOPS)
    assert sum(means) == pytest.approx(sample.ttft_ms, abs=0.01)  # times since 1970 round
    assert all(mean >= -1 for mean in means)


@pytest.mark.kafka
async def test_a_request_that_the_log_lacks_is_named(kafka: KafkaSettings) -> None:
    await ensure_model(kafka, MODEL)
    lost = Sample(now_s(), first_s=now_s(), request_id=new_request_id())
    hops = Hops(kafka, (WORK,))
    await hops.begin()
    with pytest.raises(HeadraceError, match=lost.request_id):
        await hops.mean_ms([lost])
