"""The text fold: token ids in, text that may be shown out. One pure function for all engines and every resume.

What has been released after some ids depends on those ids alone, never on how they were grouped into chunks. So a
worker that takes an answer over folds the accepted ids again, throws the text away, and goes on from that state.

Two kinds of text are held back. A character whose bytes are spread over tokens waits until it is whole; bytes that
can't become a character turn into U+FFFD, just as `bytes.decode("utf-8", "replace")` of the whole would have it. Text
that may be the beginning of a stop string waits until it is known not to be one.

An answer ends, as in vLLM (`v1/core/sched/utils.py`, `v1/engine/detokenizer.py`), by the first that holds:
1. an end-of-sequence token, unless `ignore_eos`: `stop`; the token's text isn't part of the answer;
2. one of `stop_token_ids`: `stop`, with the id as stop reason; nor is its text;
3. a stop string whose end lies in the text of a token after the first `min_tokens`: `stop`, with the string as stop
   reason; the text before it is the answer. Of several, the one that ends first counts, then the one listed first;
4. `max_tokens`: `length`.
With `include_stop_str` the text of the token or string that stopped the answer is part of it. Tokens 1 and 2 don't end
an answer before it has `min_tokens` tokens. Tokens after the end change nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from schemas.errors import HeadraceError
from schemas.events import Sampling, Usage
from schemas.reasons import Reason
from text.limits import check_stops
from text.stops import ROOT, StopMatcher
from text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended. `stop_reason`: the stop string or, in decimal, the stop token id; else None."""

    reason: Literal["stop", "length"]
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class TextState:
    """Where one answer stands.

    Attributes:
        made: tokens folded so far; the one that ended the answer counts.
        pending: the first bytes of a character that isn't whole yet; at most three.
        node: the matcher's node, which stands for the text held back for a possible stop string.
        begun: whether any text has been decoded yet.
        finish: how the answer ended, or None.
    """

    made: int = 0
    pending: bytes = b""
    node: int = ROOT
    begun: bool = False
    finish: Finish | None = None


class Step(NamedTuple):
    """The outcome of folding tokens: the state after them, the text they release, and how the answer ended, if so."""

    state: TextState
    text: str
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class TextFold:
    """The rules of one answer; see the module. Immutable: the caller keeps its state, a `TextState` a choice.

    Raises HeadraceError (invalid_request) for stop strings that `text.limits` refuses, for `max_tokens` below 1, and for
    `min_tokens` outside 0 to `max_tokens`.
    """

    tokenizer: Tokenizer
    max_tokens: int
    stops: Sequence[str] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    _matcher: StopMatcher = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the rules and build the matcher."""
        check_stops(self.stops)
        if self.max_tokens < 1:
            raise HeadraceError(Reason.INVALID_REQUEST, "max_tokens is below 1", param="sampling.max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            text = f"min_tokens is not between 0 and max_tokens ({self.max_tokens})"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param="sampling.min_tokens")
        object.__setattr__(self, "_matcher", StopMatcher(self.stops))

    @classmethod
    def of(cls, tokenizer: Tokenizer, sampling: Sampling) -> TextFold:
        """The rules that `sampling` asks for; its `max_tokens` must be resolved."""
        if sampling.max_tokens is None:
            raise HeadraceError(Reason.INVALID_REQUEST, "max_tokens isn't resolved", param="sampling.max_tokens")
        return cls(
            tokenizer,
            max_tokens=sampling.max_tokens,
            stops=sampling.stop,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            include_stop_str=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def start(self) -> TextState:
        """The state of an answer that has no tokens yet."""
        return TextState()

    def step(self, state: TextState, token_id: int) -> Step:
        """Fold one token. When it ends the answer, the text includes whatever was held back and belongs to it."""
        if state.finish is not None:
            return Step(state, "", state.finish)
        made = state.made + 1
        finish = self._finish_by_token(token_id, made)
        hidden = finish is not None and finish.reason == "stop" and not self.include_stop_str
        if hidden or (self.skip_special_tokens and self.tokenizer.is_special(token_id)):
            new, pending = "", state.pending
        else:
            new, pending = _decode(state.pending + self.tokenizer.token_bytes(token_id))
        begun = state.begun or bool(new)
        if not state.begun and self.tokenizer.strips_leading_space:
            new = new.removeprefix(" ")
        text, node, stop = self._match(state.node, new, search=made > self.min_tokens)
        if stop is not None:
            finish, pending = Finish("stop", stop), b""
        state = TextState(made, pending, node, begun, finish)
        if finish is not None:
            text += self.tail(state)
            state = replace(state, pending=b"", node=ROOT)
        return Step(state, text, finish)

    def fold(self, state: TextState, token_ids: Iterable[int]) -> Step:
        """Fold several tokens; the same as one `step` after another."""
        texts: list[str] = []
        for token_id in token_ids:
            state, text, finish = self.step(state, token_id)
            texts.append(text)
            if finish is not None:
                break
        return Step(state, "".join(texts), state.finish)

    def fold_all(self, token_ids: Iterable[int]) -> Step:
        """Fold an answer's tokens from its beginning: how a resume finds the state to go on from."""
        return self.fold(self.start(), token_ids)

    def tail(self, state: TextState) -> str:
        """The text still held back. It belongs to an answer that is ended from outside; a finished one has none."""
        return self._matcher.held(state.node) + (REPLACEMENT if state.pending else "")

    def _finish_by_token(self, token_id: int, made: int) -> Finish | None:
        if made >= self.min_tokens:
            if not self.ignore_eos and token_id in self.tokenizer.eos_token_ids:
                return Finish("stop")
            if token_id in self.stop_token_ids:
                return Finish("stop", str(token_id))
        return Finish("length") if made >= self.max_tokens else None

    def _match(self, node: int, new: str, *, search: bool) -> tuple[str, int, str | None]:
        """Add `new` to the text held at `node`. Return what is released, the new node, and the stop string found."""
        if not self.stops or not new:
            return new, node, None
        held = self._matcher.held(node)
        if not search:
            node, match = self._matcher.skip(node, new), None
        else:
            node, match = self._matcher.search(node, new)
        text = held + new
        if match is None:
            return text[: len(text) - len(self._matcher.held(node))], node, None
        end = len(held) + match.end
        return text[: end if self.include_stop_str else end - len(match.stop)], ROOT, match.stop


def usage(prompt_tokens: int, completion_tokens: Iterable[int], *, cached_tokens: int = 0) -> Usage:
    """What a request used: its prompt once, and the tokens made for each of its choices."""
    return Usage(prompt_tokens, sum(completion_tokens), cached_tokens)


def _decode(data: bytes) -> tuple[str, bytes]:
    """The characters that `data` settles, and the bytes at its end that may still become one."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]
