"""`/v1/completions`: from OpenAI's body to requests in the log, one a prompt, and from their answers to OpenAI's objects."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from bridge.calls import Call, Delta, new_request_id, shown
from bridge.errors import from_validation
from bridge.event_ids import Shape
from bridge.openai_chat import check_stream_options, effective_timeout_ms
from bridge.openai_models import CompletionRequest
from bridge.rendering import Json, Rendering, finish_reason
from schemas.events import InferenceRequested, TokenLogprob
from text.scores import finite


class CompletionCall:
    """One parsed call."""

    def __init__(self, raw: Mapping[str, Any], timeout_ms: int | None = None) -> None:
        """Takes the JSON body and the timeout that a header gave. Raises HeadraceError: invalid_request, unsupported_parameter."""
        try:
            self._body = CompletionRequest.model_validate(raw)
        except ValidationError as error:
            raise from_validation(error) from None
        self.stream = bool(self._body.stream)
        check_stream_options(self._body.stream_options, self.stream)
        self.requests = [self._request(prompt, timeout_ms) for prompt in self._body.prompt]

    def _request(self, prompt: str | list[int], timeout_ms: int | None) -> InferenceRequested:
        body = self._body
        return InferenceRequested(
            request_id=new_request_id(),
            model=body.model,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else tuple(prompt),
            sampling=body.sampling(body.max_tokens, body.logprobs),
            timeout_ms=effective_timeout_ms(body.timeout, timeout_ms),
            stream=self.stream,
            user=body.user,
        )

    def rendering(self, call: Call) -> CompletionRendering:
        """How the call's answer is shown."""
        return CompletionRendering(call, self.shape, sum(request.sampling.n for request in self.requests))

    @property
    def shape(self) -> Shape:
        """How its chunks look."""
        return Shape(True, self._body.include_usage, self._body.model)


class CompletionRendering(Rendering):
    """`text_completion`, whole and in chunks."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _chunk_choice(self, index: int, delta: Delta) -> Json:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": _logprobs(delta),
            "finish_reason": finish_reason(delta),
        }

    def _whole_choice(self, index: int, delta: Delta) -> Json:
        return self._chunk_choice(index, delta)


def _logprobs(delta: Delta) -> Json | None:
    """`top_logprobs` maps the likeliest tokens to their log-probabilities, the chosen one always among them."""
    tokens = delta.logprobs
    if tokens is None:
        return None
    texts = [shown(token.text) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": list(accumulate(map(len, texts), initial=delta.text_offset))[:-1],
    }


def _top(token: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for text, logprob in (*((other.text, other.logprob) for other in token.top), (token.text, token.logprob)):
        found.setdefault(shown(text), finite(logprob))
    return found
