"""What callers may send, in OpenAI's words, strictly: a field that isn't here is refused by its name.

Fields that OpenAI's API has and this version doesn't serve are named here too. They are taken only with a value that asks for nothing
(null, an empty list, their default), and refused otherwise; so nothing is silently ignored. `user` travels with the request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from bridge.errors import UNSUPPORTED
from schemas.events import Sampling

Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
PROMPTS_MAX = 16


class Only:
    """Marks a field that isn't served: its value must be null or one of those that ask for nothing."""

    def __init__(self, *inert: Any) -> None:
        self._inert = inert

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        """How pydantic checks such a field."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """How the OpenAPI page shows it."""
        return {"enum": [None, *self._inert], "description": "Not served: only a value that asks for nothing is taken."}

    def _check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(item) and value == item for item in self._inert):
            return value
        raise PydanticCustomError(UNSUPPORTED, "this version doesn't serve it")


Null = Annotated[Any, Only()]
NullOrFalse = Annotated[Any, Only(False)]
NullOrEmptyList = Annotated[Any, Only([])]
NullOrEmptyObject = Annotated[Any, Only({})]


def _join_content(value: Any) -> Any:
    """A message's content as one string; parts of type `text` are joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise PydanticCustomError("part", "each part of the content must be an object", {"at": f"[{i}]"})
        if part.get("type") != "text":
            raise PydanticCustomError(UNSUPPORTED, "only parts of type text are served", {"at": f"[{i}].type"})
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise PydanticCustomError(UNSUPPORTED, "a text part has no such field", {"at": f"[{i}].{unknown[0]}"})
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("part", "must be a string", {"at": f"[{i}].text"})
        texts.append(part["text"])
    return "".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Content = Annotated[
    str,
    BeforeValidator(_join_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[str],
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class Strict(BaseModel):
    """Takes no unknown field and converts no type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ChatMessage(Strict):
    """One message. An answer's message can be sent back as it came: its empty fields are taken."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    refusal: Null = None
    annotations: NullOrEmptyList = None
    audio: Null = None
    tool_calls: NullOrEmptyList = None
    function_call: Null = None


class StreamOptions(Strict):
    """`include_usage` asks for a last chunk with the usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: NullOrFalse = None


class SamplingFields(Strict):
    """What both endpoints take. `timeout` (seconds) is Headrace's own; `top_k` and below to it are vLLM's; a null takes the default."""

    model: str
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stop: Stop | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    store: NullOrFalse = None
    metadata: NullOrEmptyObject = None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """The parameters for the log; what is null takes `Sampling`'s default. vLLM's `top_k` -1 means all, as 0 does."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if self.stop is not None:
            given["stop"] = tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        return Sampling(max_tokens=max_tokens, logprobs=logprobs, **given)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_SAMPLING = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
)


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`. If both `max_tokens` and `max_completion_tokens` are given they must agree."""

    messages: list[ChatMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: NullOrEmptyList = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Only(True, False)] = None
    functions: NullOrEmptyList = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Null = None
    prediction: Null = None
    reasoning_effort: Null = None
    verbosity: Null = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    web_search_options: Null = None
    prompt_cache_key: Null = None
    safety_identifier: Null = None


def _check_prompt(value: Any) -> Any:
    """A string, token ids, or a list of either, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be a string, a list of strings, token ids, or a list of token ids")
    if not value:
        raise PydanticCustomError("prompt", "is empty")
    prompts = [value] if type(value[0]) is int else value
    if len(prompts) > PROMPTS_MAX:
        raise PydanticCustomError(
            "prompt",
            "{count} prompts are given; at most {most} are taken",
            {"count": len(prompts), "most": PROMPTS_MAX},
        )
    for i, prompt in enumerate(prompts):
        at = "" if prompts[0] is value else f"[{i}]"
        if type(prompt) is not type(prompts[0]) or not isinstance(prompt, str | list):
            raise PydanticCustomError(
                "prompt", "must be a string or a list of token ids, as the others are", {"at": at}
            )
        if isinstance(prompt, list):
            _check_ids(prompt, at)
    return prompts


def _check_ids(ids: list[Any], at: str) -> None:
    for i, token_id in enumerate(ids):
        if type(token_id) is not int or not -(1 << 63) <= token_id < 1 << 63:
            raise PydanticCustomError("prompt", "must be a token id", {"at": f"{at}[{i}]"})


_IDS = {"type": "array", "items": {"type": "integer"}}
Prompt = Annotated[
    list[Any],
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _IDS,
                {"type": "array", "items": _IDS},
            ]
        }
    ),
]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. Several prompts are served side by side; choice i of prompt p has index p·n + i."""

    prompt: Prompt
    logprobs: Int | None = None
    echo: NullOrFalse = None
    suffix: Annotated[Any, Only("")] = None
    best_of: Annotated[Any, Only(1)] = None
