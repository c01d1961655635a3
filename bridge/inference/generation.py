"""A language model behind the protocol, under the names of Triton's vLLM backend: `text_input` is the prompt, `text_output` what follows it.

What the backend takes as inputs may come as parameters, too, and the other way round in `sampling_parameters`, a JSON object. Sampling
parameters have the names and ranges of `/v1/completions`. As there, `text_output` begins with the prompt unless that is excluded or it streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from bridge.body import parse_object
from bridge.calls import Call, Delta
from bridge.inference.asking import Ask, Parameters
from bridge.inference.elements import invalid
from bridge.inference.models import (
    EXCLUDE_INPUT,
    FINISH_REASON,
    SAMPLING_PARAMETERS,
    STREAM,
    TEXT_INPUT,
    TEXT_INPUTS,
    TEXT_OUTPUT,
    TEXT_OUTPUTS,
)
from bridge.openai_completions import CompletionCall
from bridge.rendering import ANSWER_CHARS_MAX
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested
from schemas.parts import Tensor
from schemas.reasons import Reason
from schemas.tensors import misfit, strings, texts

_TEXTUAL = frozenset({"stop", "user"})
_NOT_SAMPLING = frozenset({"model", "prompt", "stream_options", "timeout", "echo"})


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked of a language model. `lead` is what `text_output` begins with."""

    request: InferenceRequested
    streams: bool
    lead: str


def read_generation(ask: Ask, parameters: Parameters, timeout_ms: int | None) -> Generation:
    """A request's inputs and parameters as one for the log. Raises HeadraceError: invalid_request, unsupported_parameter."""
    given: dict[str, Any] = {**_inputs(ask.inputs), **parameters}
    for wanted in ask.outputs:
        if wanted.name not in {spec.name for spec in TEXT_OUTPUTS}:
            raise invalid(f"the model has no output `{wanted.name}`; it has {TEXT_OUTPUT}, {FINISH_REASON}", "outputs")
    prompt = given.pop(TEXT_INPUT, None)
    if not isinstance(prompt, str):
        raise invalid(f"the input `{TEXT_INPUT}` is missing", "inputs")
    streams, excluded = _flag(given, STREAM), _flag(given, EXCLUDE_INPUT)
    if streams and excluded is False:
        raise invalid(f"with {STREAM}, {EXCLUDE_INPUT} can't be false", EXCLUDE_INPUT)
    sampling = _sampling(given)
    call = CompletionCall({**sampling, "model": ask.model, "prompt": prompt, "stream": bool(streams)}, timeout_ms)
    return Generation(call.requests[0], bool(streams), "" if streams or excluded else prompt)


def _inputs(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    specs = {spec.name: spec for spec in TEXT_INPUTS}
    found: dict[str, Any] = {}
    for tensor in inputs:
        spec = specs.get(tensor.name)
        if spec is None:
            raise invalid(f"the model has no input `{tensor.name}`; it has {', '.join(specs)}", "inputs")
        if (wrong := misfit(tensor, spec)) is not None:
            raise invalid(wrong, "inputs")
        found[tensor.name] = tensor.data == b"\x01" if spec.datatype == "BOOL" else strings(tensor)[0]
    return found


def _flag(given: dict[str, Any], name: str) -> bool | None:
    value = given.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false", name)
    return value


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    text = given.pop(SAMPLING_PARAMETERS, None)
    if text is not None and not isinstance(text, str):
        raise invalid(f"{SAMPLING_PARAMETERS} must be a JSON object in a string", SAMPLING_PARAMETERS)
    both = {**(_parsed(text) if text else {}), **given}
    for name in both:
        if name in _NOT_SAMPLING or name in (STREAM, TEXT_INPUT):
            raise HeadraceError(
                Reason.UNSUPPORTED_PARAMETER, f"{name} is not a parameter that is served here", param=name
            )
    return {name: value if name in _TEXTUAL else _plain(value) for name, value in both.items()}


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        return parse_object(text)
    except HeadraceError as error:
        raise invalid(f"{SAMPLING_PARAMETERS}: {error.message}", SAMPLING_PARAMETERS) from None


def _plain(value: Any) -> Any:
    """Triton's own examples give numbers as strings."""
    if not isinstance(value, str):
        return value
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return found if isinstance(found, int | float) else value


class Texts:
    """Collects a call's text, whole or part by part."""

    def __init__(self, generation: Generation) -> None:
        self._lead = generation.lead
        self._chars = 0
        self._choices = [Delta() for _ in range(generation.request.sampling.n)]

    def add(self, deltas: Mapping[int, Delta]) -> None:
        """More has come. Raises HeadraceError (answer_too_large)."""
        for index, delta in deltas.items():
            kept = self._choices[index]
            kept.text += delta.text
            kept.end = delta.end or kept.end
            self._chars += len(delta.text)
        if self._chars > ANSWER_CHARS_MAX:
            raise HeadraceError(Reason.ANSWER_TOO_LARGE, Reason.ANSWER_TOO_LARGE.text)

    def take(self) -> tuple[Tensor, ...]:
        """What has come since it was asked last, as `text_output` and `finish_reason`, which is empty while a choice goes on."""
        found = [self._lead + kept.text for kept in self._choices]
        ends = ["" if kept.end is None else kept.end.finish_reason for kept in self._choices]
        for kept in self._choices:
            kept.text = ""
        self._chars = 0
        return texts(TEXT_OUTPUT, found), texts(FINISH_REASON, ends)


def usage_parameters(call: Call) -> Parameters:
    """The tokens that a finished call used."""
    usage = call.usage
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
