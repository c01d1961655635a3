"""`/v1/completions`: from OpenAI's body to requests in the log, one a prompt, and from their answers to OpenAI's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from bridge.calls import Call, Delta
from bridge.door import new_request_id
from bridge.errors import from_validation
from bridge.openai_chat import check_stream_options, effective_timeout_ms
from bridge.openai_models import CompletionRequest
from bridge.rendering import Json, Rendering, finish_reason, finite
from schemas.events import InferenceRequested, TokenLogprob


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
        choices = sum(request.sampling.n for request in self.requests)
        return CompletionRendering(call, self._body.model, choices, self._body.include_usage)


class CompletionRendering(Rendering):
    """`text_completion`, whole and in chunks."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, call: Call, model: str, choices: int, include_usage: bool) -> None:
        """As the base's; remembers how far each choice's tokens reach, for `text_offset`."""
        super().__init__(call, model, choices, include_usage)
        self._offsets = [0] * choices

    def _chunk_choice(self, index: int, delta: Delta) -> Json:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta.logprobs),
            "finish_reason": finish_reason(delta),
        }

    def _whole_choice(self, index: int, delta: Delta) -> Json:
        return self._chunk_choice(index, delta)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob] | None) -> Json | None:
        """`top_logprobs` maps the likeliest tokens to their log-probabilities, the chosen one always among them."""
        if tokens is None:
            return None
        texts = [token.text.decode("utf-8", "replace") for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for text, logprob in (*((other.text, other.logprob) for other in token.top), (token.text, token.logprob)):
        found.setdefault(text.decode("utf-8", "replace"), finite(logprob))
    return found
