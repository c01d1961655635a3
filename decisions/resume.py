"""What of a whole answer follows a place in its stream: the rule by which a reader that lost its records goes on from `answers`."""

from __future__ import annotations

from dataclasses import replace

from decisions.stream import Input, StreamState
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    GenerationTakenOver,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    Timings,
    TokensGenerated,
)


def rest(answer: InferenceAnswered, state: StreamState, chars: tuple[int, ...]) -> list[Input]:
    """Events that take a stream from `state` to the answer's end, as one more attempt by nobody would have written them.

    `chars` counts, for each choice, the characters of its text that were shown; it is empty before the first start.
    """
    attempt = Attempt(0, 1) if state.attempt is None else replace(state.attempt, counter=state.attempt.counter + 1)
    where = (answer.request_id, answer.tenant, answer.model, answer.version, answer.tier)
    accepted = state.accepted or (0,) * len(answer.choices)
    events: list[Input] = []
    if answer.choices:
        events.append(GenerationTakenOver(*where, attempt, ""))
        events.append(GenerationStarted(*where, attempt, accepted, answer.usage.prompt_tokens, ""))
    for choice in answer.choices:
        first, shown = accepted[choice.choice], chars[choice.choice] if chars else 0
        logprobs = None if choice.logprobs is None else choice.logprobs[first:]
        ids, text = choice.token_ids[first:], choice.text[shown:]
        if ids or text:
            events.append(TokensGenerated(answer.request_id, choice.choice, attempt, first, ids, text, logprobs))
    if answer.error_reason is not None:
        events.append(InferenceFailed(*where, answer.error_reason, answer.error_message or ""))
    else:
        ends = tuple(
            ChoiceEnd(choice.choice, len(choice.token_ids), choice.finish_reason, choice.stop_reason)
            for choice in answer.choices
        )
        events.append(InferenceCompleted(*where, attempt, ends, answer.usage, Timings(), "", answer.outputs))
    return events
