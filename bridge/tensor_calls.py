"""What `/v1/embeddings` and `/v1/classifications` share: which models would do, one request with all inputs, and an answer made of its outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from bridge.calls import Call, Update, new_request_id
from bridge.event_ids import Shape
from bridge.openai_chat import effective_timeout_ms
from bridge.rendering import Json
from decisions.signature import problem
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, ModelVersionRegistered, Tensor, Usage
from schemas.ids import unix_ms
from schemas.reasons import Reason

INPUT = "input"
"""The field of a caller's body that becomes the request's tensors."""
_SHOWN_MAX = 16


class Models(Protocol):
    """What is served."""

    def resolve(self, model: str) -> ModelVersionRegistered | None:
        """The version that a model's name stands for."""

    def all(self) -> list[ModelVersionRegistered]:
        """Every model's."""


def version_for(models: Models, name: str, processors: Collection[str], gives: str) -> ModelVersionRegistered:
    """The version of a model that has one of these processors. Raises HeadraceError (model_not_found, invalid_request) that says which would do."""
    version = models.resolve(name)
    if version is not None and version.processor in processors:
        return version
    if version is None:
        raise HeadraceError(Reason.MODEL_NOT_FOUND, f"no model {name!r} is deployed", param="model")
    fit = [each.model for each in models.all() if each.processor in processors]
    shown = f"these do: {', '.join(fit[:_SHOWN_MAX])}" if fit else "no model that is deployed does"
    raise HeadraceError(Reason.INVALID_REQUEST, f"the model `{name}` gives no {gives}; {shown}", param="model")


class TensorCall(ABC):
    """One parsed call of a tensor model: one request in the log, whose answer comes whole."""

    stream = False
    model: str
    batched: bool
    """Whether the model's file takes any number of rows at once."""
    requests: list[InferenceRequested]

    def ask(
        self,
        version: ModelVersionRegistered,
        inputs: Sequence[Tensor],
        parameters: Mapping[str, str],
        user: str | None,
        timeout_ms: int | None,
    ) -> None:
        """Sets the request. Raises HeadraceError (invalid_request) if the version doesn't take it."""
        self.model, self.batched = version.model, version.batched
        if (found := problem(version, inputs, (), parameters)) is not None:
            raise HeadraceError(Reason.INVALID_REQUEST, found.message, param=body_param(found.param))
        self.requests = [
            InferenceRequested(
                request_id=new_request_id(),
                model=version.model,
                timeout_ms=timeout_ms,
                stream=False,
                user=user,
                inputs=tuple(inputs),
                parameters=dict(parameters),
            )
        ]

    @property
    def shape(self) -> Shape:
        """Unused: it doesn't stream."""
        return Shape(False, False, self.model)

    @abstractmethod
    def body(self, outputs: Sequence[Tensor], usage: Usage, request_id: str) -> Json:
        """The answer's body, of a request's outputs."""

    def rendering(self, call: Call) -> TensorRendering:
        """How the call's answer is shown."""
        return TensorRendering(self, call)


class TensorRendering:
    """Waits for the outputs."""

    def __init__(self, parsed: TensorCall, call: Call) -> None:
        self._parsed = parsed
        self._call = call

    def collect(self, update: Update) -> None:
        """There is nothing before the end."""

    def whole(self) -> Json:
        """The answer, once it is done."""
        leg = self._call.legs[0]
        return self._parsed.body(leg.outputs, self._call.usage, leg.request_id)


def timeout_of(body_s: float | None, header_ms: int | None) -> int | None:
    """The shorter of both, in milliseconds."""
    return effective_timeout_ms(body_s, header_ms)


def body_param(param: str | None) -> str | None:
    """A field of `InferenceRequested` by the name that these bodies have for it."""
    if param is None:
        return None
    return INPUT if param.startswith("inputs") else param.removeprefix("parameters.")


def output(outputs: Sequence[Tensor], name: str, datatype: str, rank: int) -> Tensor:
    """An output by its name. Raises HeadraceError (engine_error) if the model didn't give it so."""
    found = next((tensor for tensor in outputs if tensor.name == name), None)
    if found is None or found.datatype != datatype or len(found.shape) != rank:
        raise HeadraceError(Reason.ENGINE_ERROR, f"the model gave no {datatype} output `{name}` of {rank} dimensions")
    return found


def head(prefix: str, request_id: str, model: str, usage: Usage) -> Json:
    """What both answers begin with."""
    return {
        "id": f"{prefix}-{request_id}",
        "object": "list",
        "created": unix_ms(request_id) // 1000,
        "model": model,
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }


def parsed_body(kind: type[Any], raw: Mapping[str, Any]) -> Any:
    """A pydantic body. Raises HeadraceError as the callers know it."""
    from pydantic import ValidationError

    from bridge.errors import from_validation

    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise from_validation(error) from None
