from __future__ import annotations

import os

import pytest

from bench import load
from bench.hops import HOPS, Hops
from bench.load import Sample
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
    return make_id(int(load.now_s() * 1000), os.urandom(10))


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


async def asked(hops: Hops, kafka: KafkaSettings) -> tuple[Sample, list[int]]:
    """A call as its caller saw it, and the broker's times of its events."""
    request_id = new_request_id()
    before = TokensGenerated(request_id, 0, Attempt(0, 0), 0, (1,), "")
    producer = EventProducer(kafka, "test")
    await producer.start()
    try:
        await producer.send_and_wait(TOKENS, before, partition=0)
        await hops.begin()  # what was there before doesn't count
        sample = Sample(load.now_s(), request_id=f"chatcmpl-{request_id}")
        sent = [await producer.send_and_wait(topic, event, key=request_id) for topic, event in events(request_id)]
        sample.first_s = load.now_s()
    finally:
        await producer.stop()
    return sample, [record.timestamp for record in sent]


@pytest.mark.kafka
async def test_hops_add_up_to_what_the_caller_saw(kafka: KafkaSettings) -> None:
    await ensure_model(kafka, MODEL)
    hops = Hops(kafka, (WORK,))
    sample, stamps_ms = await asked(hops, kafka)

    means = await hops.mean_ms([sample])

    asked_ms, let_in_ms, _, answered_ms = stamps_ms
    assert len(means) == len(HOPS)
    assert means[1:3] == pytest.approx((let_in_ms - asked_ms, answered_ms - let_in_ms))
    assert sum(means) == pytest.approx(sample.ttft_ms, abs=0.01)  # times since 1970 round


@pytest.mark.kafka
async def test_a_clock_that_was_set_moves_no_time_from_one_hop_to_another(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_model(kafka, MODEL)
    monkeypatch.setattr(load, "_EPOCH_S", load._EPOCH_S - 60)  # as if the machine's were put on by a minute
    hops = Hops(kafka, (WORK,))
    sample, _ = await asked(hops, kafka)

    means = await hops.mean_ms([sample])

    assert max(abs(mean) for mean in means) < 30_000
    assert sum(means) == pytest.approx(sample.ttft_ms, abs=0.01)


@pytest.mark.kafka
async def test_a_request_that_the_log_lacks_is_named(kafka: KafkaSettings) -> None:
    await ensure_model(kafka, MODEL)
    lost = Sample(load.now_s(), first_s=load.now_s(), request_id=new_request_id())
    hops = Hops(kafka, (WORK,))
    await hops.begin()
    with pytest.raises(HeadraceError, match=lost.request_id):
        await hops.mean_ms([lost])
