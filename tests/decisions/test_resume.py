"""The rest of a whole answer takes a stream from any place to the answer's end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decisions.resume import rest
from decisions.stream import COMPLETED, FAILED, NEW, StreamState, fold
from schemas.events import Attempt, ChoiceAnswer, InferenceAnswered, TokenLogprob, TokensGenerated, Usage

ID = "01890a5d-ac96-774b-bcce-b302099a8057"


def answered(texts: tuple[str, ...], reason: str | None = None, choices: bool = True) -> InferenceAnswered:
    made = tuple(
        ChoiceAnswer(
            i, tuple(range(len(text))), text, "stop", None, tuple(TokenLogprob(k, b"", 0.0) for k in range(len(text)))
        )
        for i, text in enumerate(texts)
    )
    return InferenceAnswered(ID, "t", "m", "1", "interactive", made if choices else (), Usage(3, 4), reason, reason)


def told(
    answer: InferenceAnswered, state: StreamState, chars: tuple[int, ...]
) -> tuple[StreamState, dict[int, str], dict[int, int]]:
    shown: dict[int, str] = {}
    logprobs: dict[int, int] = {}
    for event in rest(answer, state, chars):
        state, counted = fold(state, event)
        assert counted
        if isinstance(event, TokensGenerated):
            shown[event.choice] = event.text
            logprobs[event.choice] = len(event.logprobs or ())
        for end in getattr(event, "choices", ()):
            assert end.text == ""
    return state, shown, logprobs


attempts = st.none() | st.builds(Attempt, st.integers(0, 9), st.integers(0, 2**60))


@given(st.lists(st.text(max_size=6), min_size=1, max_size=3).map(tuple), attempts, st.booleans(), st.data())
def test_exactly_what_follows_a_place_is_told_and_the_stream_ends(
    texts: tuple[str, ...], attempt: Attempt | None, started: bool, data: st.DataObject
) -> None:
    """One token a character here, of which the last few may be held back."""
    accepted = tuple(data.draw(st.integers(0, len(text))) for text in texts)
    chars = tuple(data.draw(st.integers(0, count)) for count in accepted)
    state = StreamState(attempt or Attempt(1, 1), started, accepted, tenant="t")
    for reason, outcome in ((None, COMPLETED), ("engine_error", FAILED)):
        end, shown, logprobs = told(answered(texts, reason), state, chars)
        assert end.closed is not None
        assert end.closed.outcome == outcome
        for i, text in enumerate(texts):
            assert text[: chars[i]] + shown.get(i, "") == text
            assert logprobs.get(i, 0) == len(text) - accepted[i]


def test_from_the_beginning_all_of_it_is_told() -> None:
    end, shown, _ = told(answered(("ab", "")), NEW, ())
    assert end.accepted == (2, 0)
    assert shown == {0: "ab"}


def test_an_answer_that_was_too_large_to_keep_is_a_failure() -> None:
    answer = answered(("ab",), "answer_too_large", choices=False)
    for state in (NEW, StreamState(Attempt(1, 1), True, (1,), tenant="t")):
        end, shown, _ = told(answer, state, (1,) if state.accepted else ())
        assert (end.closed is not None and end.closed.reason, shown) == ("answer_too_large", {})
