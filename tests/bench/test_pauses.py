from __future__ import annotations

import pytest

from bench.pauses import Entry, Heard, Shares, owner, shares
from decisions.stream import Input
from schemas.events import Attempt, GenerationReleased, GenerationStarted, GenerationTakenOver, TokensGenerated

ID, TENANT, MODEL = "a request", "bench", "scripted"


def started(at_ms: int, worker: int, total: int, generation: int | None = None) -> Entry:
    attempt = Attempt(generation or worker, 1)
    return entry(at_ms, GenerationStarted(ID, TENANT, MODEL, "1", "interactive", attempt, (total,), 1, f"w{worker}"))


def token(at_ms: int, worker: int, first: int) -> Entry:
    return entry(at_ms, TokensGenerated(ID, 0, Attempt(worker, 1), first, (97,), "a"))


def taken_over(at_ms: int, worker: int) -> Entry:
    return entry(at_ms, GenerationTakenOver(ID, TENANT, MODEL, "1", "interactive", Attempt(worker, 1), f"w{worker}"))


def released(at_ms: int, worker: int) -> Entry:
    return entry(at_ms, GenerationReleased(ID, Attempt(worker, 1), f"w{worker}"))


def entry(at_ms: int, event: Input) -> Entry:
    return Entry(at_ms, event)


BEGIN = [started(1_000, 1, 0), token(1_020, 1, 0), token(1_040, 1, 1)]


def test_a_pause_is_parted_by_the_marker_and_the_start() -> None:
    story = [*BEGIN, taken_over(9_040, 2), started(9_070, 2, 2), token(9_100, 2, 2), token(9_120, 2, 3)]

    assert shares(story) == Shares(8_000, 30, 30)
    assert Shares(8_000, 30, 30).total == 8_060


def test_what_a_former_owner_still_writes_does_not_shorten_the_pause() -> None:
    story = [*BEGIN, taken_over(9_040, 2), token(9_050, 1, 2), started(9_070, 2, 2), token(9_100, 2, 2)]

    assert shares(story) == Shares(8_000, 30, 30)


def test_an_owner_that_had_to_leave_again_counts_as_fencing() -> None:
    story = [
        *BEGIN,
        released(1_045, 1),
        taken_over(1_240, 2),
        taken_over(1_340, 3),
        started(1_380, 3, 2),
        token(1_400, 3, 2),
    ]

    assert shares(story) == Shares(200, 140, 20)


def test_only_the_longest_pause_is_parted() -> None:
    story = [*BEGIN, taken_over(1_240, 2), started(1_280, 2, 2), token(1_300, 2, 2)]
    rebalance = [released(1_310, 2), started(5_310, 2, 3), token(5_320, 2, 3)]

    assert shares(story) == Shares(200, 40, 20)
    assert shares([*story, *rebalance]) is None  # nobody took it over meanwhile


@pytest.mark.parametrize("count", range(len(BEGIN)))
def test_a_stream_without_a_pause_has_no_parts(count: int) -> None:
    assert shares(BEGIN[:count]) is None


def test_the_owner_is_who_started_last() -> None:
    story = [*BEGIN, taken_over(9_040, 2), started(9_070, 2, 2)]

    assert owner(story, 999) is None
    assert owner(story, 9_069.5) == "w1"
    assert owner(story, 9_070) == "w2"


def test_a_caller_waits_for_text_that_it_does_not_have() -> None:
    heard = Heard()
    for at_s, text in ((1.0, "a"), (1.02, "b"), (1.04, "c")):
        heard.take(at_s, text)
    assert heard.pause_ms == pytest.approx(20)

    heard.again()  # from the beginning, by another replica
    for at_s, text in ((1.1, "a"), (1.2, "b"), (1.3, "c"), (1.4, "d"), (1.5, "e")):
        heard.take(at_s, text)

    assert heard.text == "abcde"
    assert heard.tries == 2
    assert heard.pause_ms == pytest.approx(360)


def test_an_answer_of_one_event_has_no_pause() -> None:
    heard = Heard()
    heard.take(1.0, "whole")

    assert heard.pause_ms == 0
