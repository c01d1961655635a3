from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisions import endings as rules
from decisions.stream import Input
from decisions.verdicts import taken_back
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    GenerationTakenOver,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceStarted,
    Position,
    Tensor,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.topics import ANSWER_MAX_BYTES
from streams.fold_table import FoldTable, Output

A, B = Attempt(1, 1), Attempt(2, 1)
HOUR = 3_600_000


def started(rid: str = "r", attempt: Attempt = A, at: tuple[int, ...] = (0,)) -> GenerationStarted:
    return GenerationStarted(rid, "acme", "m", "v1", "interactive", attempt, at, 3, "w")


def tokens(
    rid: str = "r", first: int = 0, ids: tuple[int, ...] = (1,), text: str = "a", attempt: Attempt = A, choice: int = 0
) -> TokensGenerated:
    return TokensGenerated(rid, choice, attempt, first, ids, text)


def completed(
    rid: str = "r", total: int = 1, attempt: Attempt = A, tail: str = "", cached: int = 0
) -> InferenceCompleted:
    end = ChoiceEnd(0, total, "stop", "END", tail)
    return InferenceCompleted(
        rid, "acme", "m", "v1", "interactive", attempt, (end,), Usage(3, total, cached), Timings(), "w"
    )


def cancel(rid: str = "r", tenant: str = "acme") -> InferenceFailed:
    return InferenceFailed(rid, tenant, "", "", "interactive", "cancelled", "", source="cancel")


def apply(table: FoldTable, *events: Input, first: int = 0, at_ms: int = 0) -> list[Output]:
    return [output for i, event in enumerate(events) for output in table.apply(first + i, at_ms, event)]


def table(silent_below: int = 0) -> FoldTable:
    return FoldTable("tokens", 2, silent_below, 2 * HOUR)


def test_an_answer_becomes_a_start_an_ending_and_an_answer() -> None:
    begun, ending, answer = apply(
        table(),
        started(),
        tokens(text="ab", ids=(1, 2)),
        tokens(first=2, ids=(3,), text="c"),
        completed(total=3, tail="d", cached=2),
    )
    assert isinstance(begun, InferenceStarted) and begun.position == Position("tokens", 2, 0)
    assert isinstance(ending, InferenceCompleted) and ending.usage == Usage(3, 3, 2)
    assert isinstance(answer, InferenceAnswered)
    assert (answer.choices[0].text, answer.choices[0].token_ids) == ("abcd", (1, 2, 3))
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", "END")
    assert answer.usage == Usage(3, 3, 2) and answer.error_reason is None


def test_a_takeover_starts_once_and_zombies_add_nothing() -> None:
    takeover = GenerationTakenOver("r", "acme", "m", "v1", "interactive", B, "w2")
    outputs = apply(
        table(), started(), tokens(), takeover, tokens(first=1, text="ZOMBIE"), completed(total=2), started(attempt=B, at=(1,)),
        tokens(first=1, attempt=B, text="b"), completed(total=2, attempt=B),
    )  # fmt: skip
    assert [type(output) for output in outputs] == [InferenceStarted, InferenceCompleted, InferenceAnswered]
    assert isinstance(outputs[2], InferenceAnswered) and outputs[2].choices[0].text == "ab"


def test_a_cancelled_answer_keeps_what_came_and_what_is_known() -> None:
    _, ending, answer = apply(table(), started(), tokens(ids=(1, 2)), cancel())
    assert isinstance(ending, InferenceFailed)
    assert (ending.model, ending.version, ending.reason, ending.source) == ("m", "v1", "cancelled", "cancel")
    assert (ending.totals, ending.usage) == ((2,), Usage(3, 2))
    assert isinstance(answer, InferenceAnswered)
    assert (answer.error_reason, answer.choices[0].finish_reason) == ("cancelled", "error")


def test_a_cancel_of_something_unknown_is_its_ending() -> None:
    ending, answer = apply(table(), cancel())
    assert isinstance(ending, InferenceFailed)
    assert (ending.tenant, ending.reason, ending.totals, ending.usage) == ("acme", "cancelled", (), Usage(0, 0))
    assert isinstance(answer, InferenceAnswered) and answer.choices == ()


def test_another_tenants_cancel_is_nothing() -> None:
    outputs = apply(table(), started(), cancel(tenant="other"), tokens(), completed())
    assert [type(output) for output in outputs] == [InferenceStarted, InferenceCompleted, InferenceAnswered]


def test_a_rejection_is_an_answer_and_no_ending() -> None:
    rejection = InferenceRejected("r", "acme", "m", "interactive", "model_not_found", "no")
    (answer,) = apply(table(), rejection)
    assert isinstance(answer, InferenceAnswered) and answer.error_reason == "model_not_found"
    assert apply(table(), replace(rejection, request_id="")) == []


def test_a_wrong_total_is_a_failure() -> None:
    _, ending, answer = apply(table(), started(), tokens(), completed(total=2))
    assert isinstance(ending, InferenceFailed) and ending.reason == "inconsistent_stream"
    assert isinstance(answer, InferenceAnswered) and answer.error_reason == "inconsistent_stream"


def test_logprobs_are_kept() -> None:
    chunk = replace(tokens(), logprobs=(TokenLogprob(1, b"a", -0.5),))
    *_, answer = apply(table(), started(), chunk, completed())
    assert isinstance(answer, InferenceAnswered) and answer.choices[0].logprobs == chunk.logprobs


def test_an_answer_too_large_says_so_and_holds_no_memory() -> None:
    given_table = table()
    big = "x" * (rules.CONTENT_BYTES_MAX // 2 + 1)
    apply(given_table, started(), tokens(text=big), tokens(first=1, text=big))
    assert given_table.content_bytes == 0
    _, answer = apply(given_table, completed(total=2), first=3)
    assert isinstance(answer, InferenceAnswered) and answer.error_reason == "answer_too_large"
    assert answer.choices[0].text == "" and answer.usage.completion_tokens == 2


def test_an_answer_as_large_as_may_be_told_is_kept() -> None:
    text, outputs = "x" * ANSWER_MAX_BYTES, (Tensor("y", "UINT8", (ANSWER_MAX_BYTES,), bytes(ANSWER_MAX_BYTES)),)
    *_, answer = apply(table(), started(), tokens(text=text), completed())
    assert isinstance(answer, InferenceAnswered) and answer.error_reason is None
    assert answer.choices[0].text == text
    *_, answer = apply(table(), started(), replace(completed(total=0), outputs=outputs))
    assert isinstance(answer, InferenceAnswered) and answer.error_reason is None
    assert answer.outputs == outputs


def test_contents_are_let_go_oldest_first() -> None:
    given_table = table()
    apply(given_table, started("a"), started("b"), tokens("a"), tokens("b"))
    held = given_table.content_bytes
    assert given_table.drop_contents(held - 1) == 1
    *_, answer = apply(given_table, completed("b"), first=4)
    assert isinstance(answer, InferenceAnswered) and answer.choices[0].text == "a"
    *_, answer = apply(given_table, completed("a"), first=5)
    assert isinstance(answer, InferenceAnswered) and answer.error_reason == "answer_too_large"
    assert given_table.content_bytes == 0


def test_what_may_be_committed_is_below_the_oldest_open_request() -> None:
    given_table = table()
    apply(given_table, started("a"), started("b"), tokens("a"))
    assert given_table.committable == 0
    apply(given_table, completed("a"), first=3)
    assert given_table.committable == 1
    apply(given_table, tokens("b"), completed("b"), first=4)
    assert given_table.committable == 6
    given_table.skip(6)
    assert given_table.committable == 7


def test_a_zombie_does_not_open_what_has_closed() -> None:
    given_table = table()
    apply(given_table, started(), completed(total=0))
    assert apply(given_table, started(attempt=B), completed(total=0, attempt=B), cancel(), first=2) == []
    assert not given_table.open and given_table.committable == 5


@pytest.mark.parametrize(
    "word", [started(), GenerationTakenOver("r", "acme", "m", "v1", "interactive", A, "w"), cancel()]
)
def test_who_let_in_what_another_refused_is_told_its_ending_once(word: Input) -> None:
    """Two admissions decided it, one of them late. Callers heard the refusal; the other has reserved for it."""
    given_table = table()
    apply(given_table, InferenceRejected("r", "acme", "m", "interactive", "rate_limited", "too much"))
    (ended,) = apply(given_table, word, first=1)
    assert isinstance(ended, InferenceFailed)
    assert (ended.request_id, ended.tenant, ended.reason, ended.usage) == ("r", "acme", "rate_limited", Usage(0, 0))
    assert apply(given_table, started(attempt=B), tokens(attempt=B), first=2) == []
    assert not given_table.open


def of_batch(attempt: Attempt = B) -> GenerationStarted:
    return replace(started(attempt=attempt), tier="batch")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_another_tier_that_let_the_same_id_in_is_told_an_ending_of_its_own_once(at: int) -> None:
    """Its work begins while the stream goes on, or when that has ended."""
    log: list[Input] = [started(), tokens(), completed()]
    log.insert(at, of_batch())
    begun, *endings = apply(table(), *log, of_batch(A), replace(cancel(), if_not_started=True, tier="batch"))
    told = {type(ending).__name__: ending for ending in endings}
    assert (type(begun), len(endings), set(told)) == (
        InferenceStarted,
        3,
        {"InferenceCompleted", "InferenceAnswered", "InferenceFailed"},
    )
    other = told["InferenceFailed"]
    assert isinstance(other, InferenceFailed)
    assert (other.tier, other.reason, other.usage, other.source) == ("batch", "conflict", Usage(0, 0), "admission")


def test_what_was_only_forgotten_is_told_no_ending() -> None:
    given_table = table()
    apply(given_table, started())
    given_table.drop_beyond(0, 0)
    assert apply(given_table, started(attempt=B), of_batch(), first=1) == []


def test_a_late_refusal_of_what_has_begun_is_told_to_nobody() -> None:
    refusal = InferenceRejected("r", "acme", "m", "interactive", "rate_limited", "too much")
    outputs = apply(table(), started(), tokens(), refusal, completed())
    assert [type(output) for output in outputs] == [InferenceStarted, InferenceCompleted, InferenceAnswered]


def test_what_is_refused_and_taken_back_has_one_answer_and_one_ending() -> None:
    refusal = InferenceRejected("r", "acme", "m", "interactive", "record_too_large", "too large")
    answer, ended = apply(table(), refusal, taken_back(refusal), started(), tokens())
    assert isinstance(answer, InferenceAnswered) and answer.error_reason == "record_too_large"
    assert isinstance(ended, InferenceFailed)
    assert (ended.source, ended.reason, ended.usage) == ("admission", "record_too_large", Usage(0, 0))
    outputs = apply(table(), started(), refusal, taken_back(refusal), tokens(), completed())
    assert [type(output) for output in outputs] == [InferenceStarted, InferenceCompleted, InferenceAnswered]


def test_what_closed_is_forgotten_in_the_end() -> None:
    given_table = table()
    apply(given_table, started(), completed(total=0))
    apply(given_table, tokens("x"), tokens("x"), first=2, at_ms=2 * HOUR)
    assert len(apply(given_table, started(attempt=B), first=4, at_ms=2 * HOUR)) == 1


def test_too_old_and_too_many_are_dropped() -> None:
    given_table = table()
    apply(given_table, started("a"))
    apply(given_table, started("b"), started("c"), first=1, at_ms=10)
    assert given_table.drop_older_than(5) == 1
    assert given_table.drop_beyond(1, 10) == 1
    assert list(given_table.open) == ["c"] and given_table.committable == 2
    assert apply(given_table, completed("a"), first=3) == []


def test_reading_back_is_silent_and_remembers_what_closed() -> None:
    """Offsets 0 to 3 were committed: their outputs were written before. A zombie of `a` finds it closed."""
    given_table = table(silent_below=4)
    assert apply(given_table, started("a"), completed("a", total=0), tokens("b", first=7), started("c")) == []
    outputs = apply(given_table, started("a", B), started("c", B), started("d"), first=4)
    assert [output.request_id for output in outputs] == ["d"]
    assert given_table.committable == 6


REQUESTS = st.sampled_from(["a", "b", "c"])
EVENTS: st.SearchStrategy[Input] = st.one_of(
    st.builds(started, REQUESTS, st.sampled_from([A, B])),
    st.builds(tokens, REQUESTS, st.integers(0, 2)),
    st.builds(completed, REQUESTS, st.integers(0, 3), st.sampled_from([A, B])),
    st.builds(cancel, REQUESTS),
    st.builds(lambda rid: GenerationTakenOver(rid, "acme", "m", "v1", "interactive", B, "w"), REQUESTS),
)


@given(st.lists(EVENTS, max_size=40))
def test_each_request_ends_once_with_one_answer(log: list[Input]) -> None:
    outputs = apply(table(), *log)
    for rid in "abc":
        kinds = [type(output).__name__ for output in outputs if output.request_id == rid]
        assert kinds.count("InferenceStarted") <= 1
        assert (
            kinds.count("InferenceCompleted") + kinds.count("InferenceFailed") == kinds.count("InferenceAnswered") <= 1
        )


@given(st.lists(EVENTS, max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_a_crash_repeats_and_changes_nothing(log: list[Input], crash: int, back: int) -> None:
    """Whatever was committed before a crash, and wherever reading back begins: the outputs together are the same."""
    straight = apply(table(), *log)
    first = table()
    before = apply(first, *log[:crash])
    committed = first.committable
    start = max(0, committed - back)
    after = apply(table(silent_below=committed), *log[start:], first=start)
    seen = {repr(output) for output in straight}
    assert {repr(output) for output in before} <= seen
    again = {repr(output) for output in before + after}
    if start == 0:
        assert again == seen
    else:
        assert seen <= again  # reading back less, a zombie older than that may be taken for new


@given(st.lists(EVENTS, max_size=40))
def test_the_committable_offset_never_goes_back(log: list[Input]) -> None:
    given_table, last = table(), 0
    for offset, event in enumerate(log):
        given_table.apply(offset, 0, event)
        assert last <= given_table.committable <= offset + 1
        last = given_table.committable
