"""What OpenAI's two kinds of answer have in common: ids, usage, and an answer collected whole or shown chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from bridge.calls import Call, Delta, Update
from bridge.event_ids import Shape
from schemas.errors import HeadraceError
from schemas.events import Usage
from schemas.ids import unix_ms
from schemas.reasons import Reason

ANSWER_CHARS_MAX = 32 * 1024 * 1024
"""The most text that is collected for one call that doesn't stream."""

Json = dict[str, Any]


class Rendering(ABC):
    """Turns one call's updates into OpenAI's objects."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: Call, shape: Shape, choices: int) -> None:
        """`choices` is how many the call has in all."""
        self.call = call
        self.choices = choices
        self.include_usage = shape.include_usage
        self._model = shape.model
        self._collected = [Delta() for _ in range(choices)]
        self._chars = 0

    def _head(self, kind: str) -> Json:
        served = self.call.served
        return {
            "id": f"{self.id_prefix}-{self.call.request_id}",
            "object": kind,
            "created": unix_ms(self.call.request_id) // 1000,
            "model": self._model,
            "system_fingerprint": None if served is None else served.version,
        }

    # --- streamed -----------------------------------------------------------------------------------------------------

    def opening(self) -> list[Json]:
        """The chunks before the first token of a stream from its beginning."""
        return []

    def chunk(self, update: Update) -> Json | None:
        """One chunk with all that is new, of several choices if several grew: what has one event id is shown together or not at all."""
        choices = [
            self._chunk_choice(i, delta)
            for i, delta in sorted(update.deltas.items())
            if delta.text or delta.end is not None or delta.logprobs
        ]
        return self._chunk(choices) if choices else None

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> Json:
        """The last chunk, when the caller asked for it: usage and no choices."""
        return {**self._head(self.chunk_object), "choices": [], "usage": usage_object(self.call.usage)}

    @abstractmethod
    def _chunk_choice(self, index: int, delta: Delta) -> Json:
        """What is new of one choice."""

    # --- whole --------------------------------------------------------------------------------------------------------

    def collect(self, update: Update) -> None:
        """Add an update to the whole answer. Raises HeadraceError (answer_too_large)."""
        for index, delta in update.deltas.items():
            kept = self._collected[index]
            kept.text += delta.text
            kept.tokens += delta.tokens
            kept.end = delta.end or kept.end
            if delta.logprobs is not None:
                kept.logprobs = kept.logprobs or []
                kept.logprobs.extend(delta.logprobs)
            self._chars += len(delta.text) + 100 * len(delta.logprobs or ())
        if self._chars > ANSWER_CHARS_MAX:
            raise HeadraceError(Reason.ANSWER_TOO_LARGE, Reason.ANSWER_TOO_LARGE.text)

    def whole(self) -> Json:
        """The answer, once it is done."""
        choices = [self._whole_choice(i, delta) for i, delta in enumerate(self._collected)]
        return {**self._head(self.whole_object), "choices": choices, "usage": usage_object(self.call.usage)}

    @abstractmethod
    def _whole_choice(self, index: int, delta: Delta) -> Json:
        """One choice, whole."""


def finish_reason(delta: Delta) -> str | None:
    """Why the choice ended, or None while it goes on."""
    return None if delta.end is None else delta.end.finish_reason


def usage_object(usage: Usage) -> Json:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
