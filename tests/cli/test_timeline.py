from __future__ import annotations

from collections.abc import Iterator

from cli.records import Read
from cli.timeline import build, runs
from schemas.events import (
    Attempt,
    ChoiceEnd,
    Event,
    GenerationStarted,
    GenerationTakenOver,
    InferenceCompleted,
    InferenceFailed,
    InferenceJoined,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    InferenceStarted,
    Message,
    Position,
    Reply,
    Sampling,
    Timings,
    TokensGenerated,
    Usage,
)

ID = "0193b5c0-0000-7000-8000-000000000001"
NAMES = ("acme", "m", "1", "interactive")
FIRST, SECOND = Attempt(1, 1), Attempt(2, 1)


class Log:
    """Writes records at given times, each topic with its own offsets."""

    def __init__(self) -> None:
        self.records: list[Read] = []

    def write(self, at_ms: int, topic: str, event: Event | None, problem: str | None = None) -> None:
        offset = sum(r.topic == topic for r in self.records)
        self.records.append(Read(topic, 0, offset, at_ms, None, {}, b"", event, problem))


def started(attempt: Attempt, taken: int = 0) -> GenerationStarted:
    return GenerationStarted(ID, *NAMES, attempt, (taken,), 5, "w1", 3.0)


def chunk(attempt: Attempt, first: int, count: int = 1) -> TokensGenerated:
    return TokensGenerated(ID, 0, attempt, first, tuple(range(count)), "x" * count)


def completed(attempt: Attempt, total: int) -> InferenceCompleted:
    ends = (ChoiceEnd(0, total, "stop"),)
    return InferenceCompleted(ID, *NAMES, attempt, ends, Usage(5, total, 2), Timings(1, 2, 3), "w1")


def asked(log: Log) -> None:
    log.write(1_000, "requests.interactive", InferenceRequested(ID, "m", (Message("user", "Hi\nthere"),)))
    log.write(
        1_010,
        "work.m.1.interactive",
        InferenceScheduled(ID, *NAMES, (1, 2, 3), Sampling(max_tokens=9), 61_000, 1_000, Reply("tokens", 0), "s"),
    )


def test_an_answer_has_every_phase() -> None:
    log = Log()
    asked(log)
    log.write(1_030, "tokens", started(FIRST))
    log.write(1_100, "tokens", chunk(FIRST, 0))
    log.write(1_200, "tokens", chunk(FIRST, 1, 10))
    log.write(1_300, "tokens", completed(FIRST, 11))
    log.write(1_310, "lifecycle", completed(FIRST, 11))
    told = build(ID, log.records)
    phases = {"admission": 10, "queue": 20, "prefill": 70, "decode": 200, "first_token": 100, "total": 300}
    assert told.durations_ms == phases
    assert told.tokens == {"prompt": 5, "cached": 2, "completion": 11, "per_second": 50.0}
    assert told.facts["outcome"] == "completed"
    assert told.facts["tenant"] == "acme"
    assert [step.counted for step in told.steps] == [None, None, True, True, True, True, None]
    assert "Hi\\nthere" in told.steps[0].detail
    assert told.as_json()["events"][3]["data"]["type"] == "TokensGenerated"


def test_what_a_former_owner_still_sends_is_shown_as_ignored() -> None:
    log = Log()
    asked(log)
    log.write(1_030, "tokens", started(FIRST))
    log.write(1_040, "tokens", chunk(FIRST, 0))
    log.write(1_050, "tokens", GenerationTakenOver(ID, *NAMES, SECOND, "w2"))
    log.write(1_060, "tokens", chunk(FIRST, 1))
    log.write(1_070, "tokens", started(SECOND, 1))
    log.write(1_080, "tokens", chunk(SECOND, 1))
    log.write(1_090, "tokens", completed(SECOND, 2))
    told = build(ID, log.records)
    assert [step.counted for step in told.steps[2:]] == [True, True, True, False, True, True, True]
    assert told.tokens["completion"] == 2
    assert "going on after 1 tokens" in told.steps[6].detail


def test_a_takeover_of_what_nobody_had_begun_is_told_as_a_precaution() -> None:
    log = Log()
    asked(log)
    log.write(1_020, "tokens", GenerationTakenOver(ID, *NAMES, FIRST, "w1"))
    log.write(1_030, "tokens", started(FIRST))
    log.write(1_040, "tokens", chunk(FIRST, 0))
    log.write(1_050, "tokens", GenerationTakenOver(ID, *NAMES, SECOND, "w2"))
    told = build(ID, log.records)
    assert told.steps[2].detail == "attempt 1.1 by w1; a precaution after a restart: nobody had begun it"
    assert told.steps[5].detail == "attempt 2.1 by w2"


def test_a_refusal_says_why() -> None:
    log = Log()
    log.write(1_000, "requests.interactive", InferenceRequested(ID, "nobody", prompt="x"))
    refused = InferenceRejected(ID, "acme", "nobody", "interactive", "model_not_found", "no such model")
    log.write(1_005, "tokens", refused)
    log.write(1_006, "lifecycle", refused)
    told = build(ID, log.records)
    assert (told.facts["outcome"], told.facts["reason"]) == ("rejected", "model_not_found")
    assert told.durations_ms["queue"] is None
    assert told.durations_ms["total"] == 5


def test_a_late_refusal_of_what_has_begun_isnt_how_it_stands() -> None:
    log = Log()
    asked(log)
    log.write(1_030, "tokens", started(FIRST))
    refused = InferenceRejected(ID, "acme", "m", "interactive", "rate_limited", "too much")
    log.write(1_040, "tokens", refused)
    log.write(1_041, "lifecycle", refused)
    told = build(ID, log.records)
    assert (told.facts["outcome"], told.facts["reason"]) == ("open", None)
    assert told.steps[-2].counted is False


def test_a_request_that_waits_is_open() -> None:
    log = Log()
    asked(log)
    told = build(ID, log.records)
    assert told.facts["outcome"] == "open"
    assert told.durations_ms["total"] is None


def test_a_failure_and_junk() -> None:
    log = Log()
    asked(log)
    log.write(1_020, "tokens", None, "the record is junk")
    log.write(
        1_030,
        "tokens",
        InferenceFailed(ID, *NAMES, "deadline_exceeded", "too late", if_not_started=True, source="timer"),
    )
    told = build(ID, log.records)
    assert (told.facts["outcome"], told.facts["reason"]) == ("failed", "deadline_exceeded")
    assert told.steps[2].detail == "the record is junk"
    assert "(timer)" in told.steps[3].detail


def test_long_runs_of_chunks_are_put_together() -> None:
    log = Log()
    asked(log)
    log.write(1_030, "tokens", started(FIRST))
    for number in range(50):
        log.write(1_100 + number, "tokens", chunk(FIRST, number))
    log.write(1_031, "lifecycle", InferenceStarted(ID, *NAMES, FIRST, "w1", 1.0, Position("tokens", 0, 0)))
    log.write(1_200, "tokens", completed(FIRST, 50))
    steps = build(ID, sorted(log.records, key=lambda r: r.timestamp_ms)).steps
    shown = runs(steps)
    together = [item for item in shown if isinstance(item, list)]
    assert [len(item) for item in together] == [47]

    def flat() -> Iterator[object]:
        for item in shown:
            yield from item if isinstance(item, list) else [item]

    assert {id(step) for step in flat()} == {id(step) for step in steps}


def test_short_runs_stay_whole() -> None:
    log = Log()
    for number in range(5):
        log.write(number, "tokens", chunk(FIRST, number))
    assert not any(isinstance(item, list) for item in runs(build(ID, log.records).steps))


def test_a_repeat_tells_whose_stream_is_its_answer() -> None:
    log = Log()
    asked(log)
    first = "0193b5c0-0000-7000-8000-000000000000"
    joined = InferenceJoined(ID, "acme", "m", "interactive", first, Reply("tokens", 2), 900)
    for topic in ("tokens", "lifecycle"):
        log.write(1_020, topic, joined)
    timeline = build(ID, log.records)
    assert timeline.facts["outcome"] == f"joined {first}"
    assert timeline.steps[-1].detail == f"asked before: its answer is the stream of {first} on tokens:2"
