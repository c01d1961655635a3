"""What callers get, in OpenAI's words: for the OpenAPI page, and for the tests that hold real answers against it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Has exactly these fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(Answer):
    """What is wrong: `code` is from Headrace's closed list, `param` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer):
    """Every refusal and failure."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, those found in the engine's prefix cache."""

    cached_tokens: int


class UsageAnswer(Answer):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenAnswer(Answer):
    """A token, its log-probability, and its bytes (a token may be part of a character)."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenAnswer):
    """The chosen token and the likeliest at its place."""

    top_logprobs: list[TokenAnswer]


class ChatLogprobs(Answer):
    """A choice's log-probabilities."""

    content: list[ChosenToken]
    refusal: None


FinishReason = Literal["stop", "length"]


class AssistantMessage(Answer):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class _Head(Answer):
    """What all answers begin with. `system_fingerprint` is the model's version."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class ChatAnswer(_Head):
    """An answer that doesn't stream."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatDelta(Answer):
    """What is new: the role first, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(_Head):
    """One event of a stream. `choices` may hold several if `n` is above 1; it is empty in the chunk that tells the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None


class CompletionLogprobs(Answer):
    """A choice's log-probabilities, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One of the answers; choice i of prompt p has index p·n + i. Only in a chunk may `finish_reason` be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionAnswer(_Head):
    """An answer, whole or one chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


class InputUsage(Answer):
    """Tokens of the inputs; nothing is generated. 0 where the model reads no tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(Answer):
    """One input's embedding: numbers, or little-endian 32-bit floats in base64. A number that isn't finite is null."""

    object: Literal["embedding"]
    index: int
    embedding: list[float | None] | str


class ClassObject(Answer):
    """A label and its score."""

    label: str
    score: float | None


class ClassificationObject(ClassObject):
    """One input's likeliest class, and as many as were asked for, best first."""

    object: Literal["classification"]
    index: int
    classes: list[ClassObject]


class _List(Answer):
    """What the answers of small models begin with."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: InputUsage


class EmbeddingAnswer(_List):
    """The embeddings, in the order of the inputs."""

    data: list[EmbeddingObject]


class ClassificationAnswer(_List):
    """The classes, in the order of the inputs."""

    data: list[ClassificationObject]


class CancelAnswer(Answer):
    """A request that is being cancelled."""

    id: str
    object: Literal["stream"]
    status: Literal["cancelling"]


class ModelAnswer(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(Answer):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]
