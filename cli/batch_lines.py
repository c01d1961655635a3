"""A batch job's lines: what each asks, as the front door would read it, and its answer as OpenAI's batches have it.

A line is one of OpenAI's (`custom_id`, `method`, `url`, `body`), or plain: `{"text": …}`, `{"input": …}` or `{"base64": …}` with an `id` if it likes,
for a model that embeds or classifies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from bridge.body import parse_object
from bridge.calls import Call
from bridge.openai_chat import ChatCall
from bridge.openai_classifications import ClassificationCall
from bridge.openai_completions import CompletionCall
from bridge.openai_embeddings import EmbeddingCall
from bridge.tensor_calls import Models, TensorCall, body_param
from decisions.admission import unknown_model
from decisions.jobs import SPLIT_PART, Weight, merged, parted, shares
from decisions.resume import rest
from decisions.signature import EMBEDDING, LENGTHS, PROCESSORS, unfit
from decisions.validation import problem
from schemas.errors import HeadraceError
from schemas.events import InferenceAnswered, InferenceRequested, Tensor, Usage
from schemas.reasons import Reason, lookup
from schemas.topics import REQUEST_MAX_BYTES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, CLASSIFICATIONS = "/v1/embeddings", "/v1/classifications"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS, CLASSIFICATIONS)
CUSTOM_ID_CHARS_MAX = 512
PENDING_BYTES_MAX = 1 << 40
"""Nothing is too much for a file."""
_OPENAI_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_PLAIN_FIELDS = frozenset({"id", "text", "input", "base64"})
OUTPUT_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE

ParsedCall = ChatCall | CompletionCall | TensorCall


@dataclass(frozen=True, slots=True)
class Asking:
    """What holds for all lines: the model that is asked whatever they name, what is served, and the wishes of plain lines.

    `repeats` are the numbers of lines whose id an earlier line has, and of which that is: they aren't asked. `prompts` says that a line for a language
    model whose model isn't there can't be asked; else the log says so.
    """

    models: Models
    model: str | None = None
    wishes: Mapping[str, Any] = field(default_factory=dict)
    repeats: Mapping[int, int] = field(default_factory=dict)
    prompts: bool = True


@dataclass(slots=True)
class Line:
    """A line. `number` counts from 1; `fault` is set where it can't be asked."""

    number: int
    custom_id: str
    call: ParsedCall | None = None
    fault: HeadraceError | None = None

    @property
    def requests(self) -> list[InferenceRequested]:
        """What it asks; nothing if it can't."""
        return [] if self.call is None else self.call.requests

    @property
    def rows(self) -> int:
        """Rows of a small model's line."""
        (request,) = self.requests
        given = {tensor.name: tensor for tensor in request.inputs or ()}
        return (given.get(LENGTHS) or next(iter(given.values()))).shape[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of a small model's line."""
        return sum(len(tensor.data) for request in self.requests for tensor in request.inputs or ())

    def weight(self) -> Weight:
        """What it can travel with: lines of the same model that ask the same of it. One that runs rows one by one gets its lines one by one: for many
        together the deadline of one may be too short.
        """
        if not isinstance(self.call, TensorCall) or not self.call.batched:
            return Weight(None)
        (request,) = self.requests
        wishes = tuple(sorted(request.parameters.items()))
        names = tuple(tensor.name for tensor in request.inputs or ())
        return Weight((request.model, names, wishes, request.user, request.timeout_ms), self.rows, self.size_bytes)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_line(raw: bytes, number: int, asking: Asking) -> Line:
    """A line. What can't be asked has its `fault`: it names the field."""
    custom_id = f"line-{number}"
    try:
        given = parse_object(raw)
        openai = "body" in given or "url" in given or "custom_id" in given
        custom_id = _custom_id(given, custom_id, openai)
        if (before := asking.repeats.get(number)) is not None:
            raise _fault(repeats_text(custom_id, before), "custom_id" if openai else "id")
        url, body = _openai(given) if openai else _plain(given, asking)
        call = _call(url, {**body, "model": asking.model} if asking.model else body, asking)
        for request in () if isinstance(call, TensorCall) else call.requests:  # a tensor call has been looked at
            if (found := problem(request, REQUEST_MAX_BYTES)) is not None:
                raise HeadraceError(Reason.INVALID_REQUEST, found.message, param=found.param)
    except HeadraceError as fault:
        return Line(number, custom_id, fault=fault)
    return Line(number, custom_id, call)


def repeats_text(custom_id: str, before: int) -> str:
    """What is wrong with a line whose id an earlier one has."""
    return f"the id {custom_id!r} is that of line {before}, too"


def _fault(text: str, param: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, text, param=param)


def _custom_id(given: Mapping[str, Any], default: str, openai: bool) -> str:
    name = "custom_id" if openai else "id"
    value = given.get(name, None if openai else default)
    if not openai and type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value) <= CUSTOM_ID_CHARS_MAX:
        raise _fault(f"{name} must be a string of 1 to {CUSTOM_ID_CHARS_MAX} characters", name)
    return value


def _openai(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if unknown := sorted(given.keys() - _OPENAI_FIELDS):
        raise _fault(f"{unknown[0]} is unknown; a line has {', '.join(sorted(_OPENAI_FIELDS))}", unknown[0])
    if given.get("method", "POST") != "POST":
        raise _fault("method must be POST", "method")
    if given.get("url") not in URLS:
        raise _fault(f"url must be one of {', '.join(URLS)}", "url")
    if not isinstance(given.get("body"), dict):
        raise _fault("body must be an object", "body")
    if given["body"].get("stream"):
        raise _fault("body.stream: a batch doesn't stream", "body.stream")
    return given["url"], given["body"]


def _plain(given: Mapping[str, Any], asking: Asking) -> tuple[str, dict[str, Any]]:
    if unknown := sorted(given.keys() - _PLAIN_FIELDS):
        raise _fault(f"{unknown[0]} is unknown; a plain line has text, input or base64, and id", unknown[0])
    inputs = [name for name in ("text", "input", "base64") if name in given]
    if len(inputs) != 1:
        raise _fault("a plain line has one of text, input and base64", "text")
    if asking.model is None:
        raise _fault("plain lines need --model", "model")
    if (version := asking.models.resolve(asking.model)) is None:
        raise HeadraceError(Reason.MODEL_NOT_FOUND, f"no model {asking.model!r} is deployed", param="model")
    if version.processor not in PROCESSORS:
        raise _fault(f"plain lines are for models that embed or classify, and `{asking.model}` doesn't", "model")
    value = given[inputs[0]]
    body = {"input": {"base64": value} if inputs[0] == "base64" else value, **asking.wishes}
    return EMBEDDINGS if version.processor == EMBEDDING else CLASSIFICATIONS, body


def _call(url: str, body: Mapping[str, Any], asking: Asking) -> ParsedCall:
    if url in (CHAT, COMPLETIONS):
        call = ChatCall(body) if url == CHAT else CompletionCall(body)
        if asking.prompts:
            _check_prompted(call.requests[0], asking.models)
        return call
    kind = EmbeddingCall if url == EMBEDDINGS else ClassificationCall
    return kind(body, None, asking.models)


def _check_prompted(request: InferenceRequested, models: Models) -> None:
    """Raises HeadraceError with admission's words if a prompt's model isn't there, or takes none."""
    if (version := models.resolve(request.model)) is None:
        refusal = unknown_model(request.model)
        raise HeadraceError(refusal.reason, refusal.message, param=refusal.param)
    if (found := unfit(request, version)) is not None:
        raise HeadraceError(Reason.INVALID_REQUEST, found.message, param=found.param)


# --- a unit's requests, and its lines' answers -----------------------------------------------------------------------


def requests_of(lines: Sequence[Line], split: bool) -> dict[int, InferenceRequested]:
    """What a unit asks, by part: `decisions.jobs.Part` says how they are numbered."""
    if split:
        return {SPLIT_PART + index: line.requests[0] for index, line in enumerate(lines)}
    if len(lines) == 1:
        return dict(enumerate(lines[0].requests))
    first = lines[0].requests[0]
    inputs = merged([line.requests[0].inputs or () for line in lines])
    return {0: replace(first, inputs=inputs)}


def outputs_of(
    lines: Sequence[Line], answers: Mapping[int, InferenceAnswered], split: bool
) -> list[tuple[bytes, bool]]:
    """The output's lines of a unit of which all is answered, and whether each is an answer. Needs a running event loop."""
    if split:
        return [_output(line, [answers[SPLIT_PART + index]]) for index, line in enumerate(lines)]
    if len(lines) == 1:
        return [_output(lines[0], [answers[part] for part in sorted(answers)])]
    (answer,) = answers.values()
    if (error := _error(answer)) is not None:
        return [failed(line, error, answer.request_id) for line in lines]
    try:
        rows = parted(answer.outputs, [line.rows for line in lines])
    except ValueError as unlike:
        return [failed(line, HeadraceError(Reason.ENGINE_ERROR, str(unlike)), answer.request_id) for line in lines]
    used = shares(answer.usage.prompt_tokens, [line.size_bytes for line in lines])
    return [
        _tensors(line, outputs, Usage(tokens, 0), answer.request_id)
        for line, outputs, tokens in zip(lines, rows, used, strict=True)
    ]


def _error(answer: InferenceAnswered) -> HeadraceError | None:
    if answer.error_reason is None:
        return None
    return HeadraceError(lookup(answer.error_reason), answer.error_message or answer.error_reason)


def _output(line: Line, answers: Sequence[InferenceAnswered]) -> tuple[bytes, bool]:
    for answer in answers:
        if (fault := _error(answer)) is not None:
            return failed(line, fault, answer.request_id)
    if isinstance(line.call, TensorCall):
        return _tensors(line, answers[0].outputs, answers[0].usage, answers[0].request_id)
    assert line.call is not None
    try:
        return _line(line, answers[0].request_id, _generated(line.call, answers))
    except HeadraceError as error:
        return failed(line, error, answers[0].request_id)


def _generated(parsed: ChatCall | CompletionCall, answers: Sequence[InferenceAnswered]) -> dict[str, Any]:
    """The body that the front door would have answered with."""
    call = Call(PENDING_BYTES_MAX, 0.0)
    choice = 0
    for request, answer in zip(parsed.requests, answers, strict=True):
        leg = call.add_leg(answer.request_id, choice)
        choice += request.sampling.n
        for offset, event in enumerate(rest(answer, leg.state, ())):
            call.feed(leg, event, 0, offset)
    rendering = parsed.rendering(call)
    rendering.collect(call.take())
    return rendering.whole()


def _tensors(line: Line, outputs: Sequence[Tensor], usage: Usage, request_id: str) -> tuple[bytes, bool]:
    assert isinstance(line.call, TensorCall)
    try:
        return _line(line, request_id, line.call.body(outputs, usage, request_id))
    except HeadraceError as error:
        return failed(line, error, request_id)


def _line(line: Line, request_id: str, body: Mapping[str, Any]) -> tuple[bytes, bool]:
    response = {"status_code": 200, "request_id": request_id, "body": body}
    found = {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": None}
    return orjson.dumps(found, option=OUTPUT_OPTIONS), True


def failed(line: Line, error: HeadraceError, request_id: str | None = None) -> tuple[bytes, bool]:
    """The output's line of an error: `response` is null if nothing was asked."""
    code, message = error.reason.value, error.message
    param = body_param(error.param) if isinstance(line.call, TensorCall) else error.param
    told = {"code": code, "message": message, "param": param, "line": line.number}
    response = None
    if request_id is not None:
        body = {"error": {"message": message, "type": error.reason.openai_type, "param": param, "code": code}}
        response = {"status_code": error.reason.http_status, "request_id": request_id, "body": body}
    name = f"batch_req_{request_id}" if request_id is not None else f"batch_req_line_{line.number}"
    found = {"id": name, "custom_id": line.custom_id, "response": response, "error": told}
    return orjson.dumps(found, option=OUTPUT_OPTIONS), False
