"""`/v1/chat/completions`: from OpenAI's body to the request in the log, and from its answer to OpenAI's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from bridge.calls import Call, Delta, new_request_id, shown
from bridge.errors import from_validation
from bridge.event_ids import Shape
from bridge.openai_models import ChatRequest
from bridge.rendering import Json, Rendering, finish_reason
from decisions.validation import LOGPROBS_MAX
from schemas.errors import HeadraceError
from schemas.events import Alternative, InferenceRequested, Message, TokenLogprob
from schemas.reasons import Reason
from text.scores import finite


class ChatCall:
    """One parsed call."""

    def __init__(self, raw: Mapping[str, Any], timeout_ms: int | None = None) -> None:
        """Takes the JSON body and the timeout that a header gave. Raises HeadraceError: invalid_request, unsupported_parameter."""
        try:
            self._body = ChatRequest.model_validate(raw)
        except ValidationError as error:
            raise from_validation(error) from None
        self.stream = bool(self._body.stream)
        check_stream_options(self._body.stream_options, self.stream)
        self.requests = [self._request(timeout_ms)]

    def _request(self, timeout_ms: int | None) -> InferenceRequested:
        body = self._body
        messages = tuple(Message(message.role, message.content, message.name) for message in body.messages)
        return InferenceRequested(
            request_id=new_request_id(),
            model=body.model,
            messages=messages,
            sampling=body.sampling(self._max_tokens(), self._logprobs()),
            timeout_ms=effective_timeout_ms(body.timeout, timeout_ms),
            stream=self.stream,
            user=body.user,
        )

    def _max_tokens(self) -> int | None:
        body = self._body
        if body.max_completion_tokens is None:
            return body.max_tokens
        if body.max_tokens not in (None, body.max_completion_tokens):
            text = "max_tokens and max_completion_tokens are both given and differ"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param="max_completion_tokens")
        return body.max_completion_tokens

    def _logprobs(self) -> int | None:
        body = self._body
        if not 0 <= (body.top_logprobs or 0) <= LOGPROBS_MAX:
            text = f"top_logprobs must be between 0 and {LOGPROBS_MAX}"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param="top_logprobs")
        if body.logprobs:
            return body.top_logprobs or 0
        if body.top_logprobs:
            raise HeadraceError(Reason.INVALID_REQUEST, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None

    def rendering(self, call: Call) -> ChatRendering:
        """How the call's answer is shown."""
        return ChatRendering(call, self.shape, self.requests[0].sampling.n)

    @property
    def shape(self) -> Shape:
        """How its chunks look."""
        return Shape(False, self._body.include_usage, self._body.model)


class ChatRendering(Rendering):
    """`chat.completion` and `chat.completion.chunk`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """A chunk a choice that tells the role."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self.choices)
        ]

    def _chunk_choice(self, index: int, delta: Delta) -> Json:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text or delta.logprobs else {},
            "logprobs": _logprobs(delta.logprobs),
            "finish_reason": finish_reason(delta),
        }

    def _whole_choice(self, index: int, delta: Delta) -> Json:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(delta.logprobs),
            "finish_reason": finish_reason(delta),
        }


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> Json | None:
    if tokens is None:
        return None
    return {
        "content": [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens],
        "refusal": None,
    }


def _token(token: TokenLogprob | Alternative) -> Json:
    return {"token": shown(token.text), "logprob": finite(token.logprob), "bytes": list(token.text)}


def check_stream_options(options: object | None, stream: bool) -> None:
    """Raises HeadraceError (invalid_request) if options of a stream are given without one."""
    if options is not None and not stream:
        raise HeadraceError(Reason.INVALID_REQUEST, "stream_options needs stream: true", param="stream_options")


def effective_timeout_ms(body_s: float | None, header_ms: int | None) -> int | None:
    """The shorter of the body's `timeout` and the header's, in milliseconds."""
    given = [
        value for value in (None if body_s is None else max(1, round(body_s * 1000)), header_ms) if value is not None
    ]
    return min(given) if given else None
