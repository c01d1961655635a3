"""Which requests are well-formed: every field's range, whatever the model. The first fault found is named by its field.

Ranges follow OpenAI's and vLLM's (`vllm/sampling_params.py`). What depends on the model (its vocabulary, its context) is
checked by `vocabulary_problem`, and in `admission`, once the model is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from decisions.cache import parse
from decisions.problem import Problem
from decisions.signature import input_problem
from schemas.events import InferenceRequested, Message, Sampling, Tensor
from schemas.ids import is_request_id
from schemas.parts import STOP_CHARS_MAX, STOPS_MAX

MODEL_CHARS_MAX = 100
MESSAGES_MAX = 4_096
ROLES = ("system", "developer", "user", "assistant", "tool")
NAME_CHARS_MAX = 256
USER_CHARS_MAX = 512
KEY_CHARS_MAX = 255
TIMEOUT_MS_MAX = 86_400_000
CHOICES_MAX = 8
LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 64
LOGIT_BIAS_MAX = 300
BIAS_MAX = 100.0
TOP_K_MAX = (1 << 31) - 1
REPETITION_PENALTY_MAX = 100.0

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,17}")


def problem(request: InferenceRequested, content_bytes_max: int, *, inputs_checked: bool = False) -> Problem | None:
    """The first fault of a request, or None. `content_bytes_max` bounds what it gives the model to read, in UTF-8 bytes.

    Tensors that `input_problem` has seen, as `inputs_checked` says, aren't looked through again.
    """
    return (
        _identity(request)
        or _exactly_one_input(request)
        or _of_its_kind(request)
        or (None if inputs_checked and request.inputs is not None else _input(request))
        or _size(request, content_bytes_max)
        or sampling_problem(request.sampling)
        or _timeout(request.timeout_ms)
        or _cache_control(request.cache_control)
    )


def _identity(request: InferenceRequested) -> Problem | None:
    if not is_request_id(request.request_id):
        return Problem("request_id must be a UUID of version 7 in lower case", "request_id")
    if not 0 < len(request.model) <= MODEL_CHARS_MAX:
        return Problem(f"model must have 1 to {MODEL_CHARS_MAX} characters", "model")
    if request.user is not None and len(request.user) > USER_CHARS_MAX:
        return Problem(f"user has {len(request.user)} characters; at most {USER_CHARS_MAX} are taken", "user")
    if len(request.call) > KEY_CHARS_MAX:
        return Problem(f"call must have at most {KEY_CHARS_MAX} characters", "call")
    return key_problem(request.idempotency_key, "idempotency_key") if request.idempotency_key else None


def key_problem(key: str, param: str) -> Problem | None:
    """What is wrong with an idempotency key, or None. It is compared as it is, byte by byte, so it may hold nothing that isn't seen."""
    if 0 < len(key) <= KEY_CHARS_MAX and key.isascii() and key.isprintable():
        return None
    return Problem(f"{param} must have 1 to {KEY_CHARS_MAX} printable ASCII characters, such as a UUID", param)


def _exactly_one_input(request: InferenceRequested) -> Problem | None:
    values = request.messages, request.prompt, request.prompt_token_ids, request.inputs
    if values.count(None) == len(values) - 1:
        return None
    names = "messages", "prompt", "prompt_token_ids", "inputs"
    given = [name for name, value in zip(names, values, strict=True) if value is not None]
    if not given:
        return Problem("one of messages, prompt, prompt_token_ids and inputs must be given", "messages")
    return Problem(f"only one of {' and '.join(given)} may be given", given[1])


def _of_its_kind(request: InferenceRequested) -> Problem | None:
    """What belongs to tensors stands beside tensors, and what belongs to texts beside texts."""
    if request.inputs is not None:
        return (
            None if request.sampling.n == 1 else Problem("a tensor model gives one answer: n must be 1", "sampling.n")
        )
    if request.outputs:
        return Problem("outputs belong to inputs, and none are given", "outputs")
    return Problem("parameters belong to inputs, and none are given", "parameters") if request.parameters else None


def _input(request: InferenceRequested) -> Problem | None:
    if request.inputs is not None:
        return input_problem(request.inputs, request.outputs, request.parameters)
    if request.prompt is not None:
        return None if request.prompt else Problem("prompt is empty", "prompt")
    if request.prompt_token_ids is not None:
        return None if request.prompt_token_ids else Problem("prompt_token_ids is empty", "prompt_token_ids")
    messages = request.messages or ()
    if not messages:
        return Problem("messages is empty", "messages")
    if len(messages) > MESSAGES_MAX:
        return Problem(f"{len(messages)} messages are given; at most {MESSAGES_MAX} are taken", "messages")
    return next((found for i, message in enumerate(messages) if (found := _message(message, f"messages[{i}]"))), None)


def _message(message: Message, where: str) -> Problem | None:
    if message.role not in ROLES:
        return Problem(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if message.name is not None and not 0 < len(message.name) <= NAME_CHARS_MAX:
        return Problem(f"{where}.name must have 1 to {NAME_CHARS_MAX} characters", f"{where}.name")
    return None


def _size(request: InferenceRequested, content_bytes_max: int) -> Problem | None:
    """Characters bound bytes from both sides, so a text is encoded only where that decides."""
    if request.prompt_token_ids is not None:
        return None  # the record's own limit and the model's context bound them
    if request.inputs is not None:
        return _tensors_size(request.inputs, content_bytes_max)
    param, texts = ("prompt", (request.prompt,)) if request.prompt is not None else ("messages", _texts(request))
    chars = sum(len(text or "") for text in texts)
    if chars * 4 <= content_bytes_max:
        return None
    size = chars if chars > content_bytes_max else sum(len((text or "").encode(errors="replace")) for text in texts)
    if size <= content_bytes_max:
        return None
    return Problem(f"{param} has {size} bytes or more; at most {content_bytes_max} are taken", param, too_large=True)


def _tensors_size(inputs: Sequence[Tensor], content_bytes_max: int) -> Problem | None:
    size = sum(len(tensor.data) for tensor in inputs)
    if size <= content_bytes_max:
        return None
    return Problem(f"inputs have {size} bytes; at most {content_bytes_max} are taken", "inputs", too_large=True)


def _texts(request: InferenceRequested) -> tuple[str, ...]:
    return tuple(message.content for message in request.messages or ())


def _timeout(timeout_ms: int | None) -> Problem | None:
    if timeout_ms is None or 1 <= timeout_ms <= TIMEOUT_MS_MAX:
        return None
    return Problem(f"timeout_ms must be between 1 and {TIMEOUT_MS_MAX}", "timeout_ms")


def _cache_control(cache_control: str | None) -> Problem | None:
    if cache_control is None:
        return None
    try:
        parse(cache_control)
    except ValueError as error:
        return Problem(f"cache_control: {error}", "cache_control")
    return None


def sampling_problem(sampling: Sampling) -> Problem | None:
    """The first fault of the sampling parameters, or None."""
    for name, text, holds in _RANGES:
        if not holds(sampling):
            return Problem(f"{name} must be {text}", f"sampling.{name}")
    return _stops(sampling.stop) or _stop_token_ids(sampling.stop_token_ids) or _logit_bias(sampling.logit_bias)


def _between(low: float, value: float, high: float) -> bool:
    """False for NaN too."""
    return low <= value <= high


_RANGES: tuple[tuple[str, str, Callable[[Sampling], bool]], ...] = (
    ("max_tokens", "at least 1", lambda s: s.max_tokens is None or s.max_tokens >= 1),
    ("min_tokens", "at least 0, and at most max_tokens", lambda s: _between(0, s.min_tokens, s.max_tokens or math.inf)),
    ("temperature", "between 0 and 2", lambda s: _between(0, s.temperature, 2)),
    ("top_p", "above 0 and at most 1", lambda s: 0 < s.top_p <= 1),
    ("top_k", f"between 0 (all) and {TOP_K_MAX}", lambda s: _between(0, s.top_k, TOP_K_MAX)),
    ("min_p", "between 0 and 1", lambda s: _between(0, s.min_p, 1)),
    ("presence_penalty", "between -2 and 2", lambda s: _between(-2, s.presence_penalty, 2)),
    ("frequency_penalty", "between -2 and 2", lambda s: _between(-2, s.frequency_penalty, 2)),
    (
        "repetition_penalty",
        f"above 0 and at most {REPETITION_PENALTY_MAX:g}",
        lambda s: 0 < s.repetition_penalty <= REPETITION_PENALTY_MAX,
    ),
    ("seed", "an integer of 64 bits", lambda s: s.seed is None or _between(-(1 << 63), s.seed, (1 << 63) - 1)),
    ("n", f"between 1 and {CHOICES_MAX}", lambda s: _between(1, s.n, CHOICES_MAX)),
    (
        "logprobs",
        f"between 0 and {LOGPROBS_MAX}",
        lambda s: s.logprobs is None or _between(0, s.logprobs, LOGPROBS_MAX),
    ),
)


def _stops(stops: tuple[str, ...]) -> Problem | None:
    if len(stops) > STOPS_MAX:
        return Problem(f"{len(stops)} stop strings are given; at most {STOPS_MAX} are taken", "sampling.stop")
    for i, stop in enumerate(stops):
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            return Problem(f"stop[{i}] must have 1 to {STOP_CHARS_MAX} characters", f"sampling.stop[{i}]")
    return None


def _stop_token_ids(ids: tuple[int, ...]) -> Problem | None:
    if len(ids) > STOP_TOKEN_IDS_MAX:
        return Problem(
            f"{len(ids)} stop_token_ids are given; at most {STOP_TOKEN_IDS_MAX} are taken", "sampling.stop_token_ids"
        )
    return None


def _logit_bias(biases: dict[str, float]) -> Problem | None:
    if len(biases) > LOGIT_BIAS_MAX:
        return Problem(
            f"logit_bias has {len(biases)} entries; at most {LOGIT_BIAS_MAX} are taken", "sampling.logit_bias"
        )
    for token_id, bias in biases.items():
        if not _TOKEN_ID.fullmatch(token_id):
            return Problem("logit_bias maps token ids, in decimal, to numbers", "sampling.logit_bias")
        if not _between(-BIAS_MAX, bias, BIAS_MAX):
            return Problem(
                f"logit_bias.{token_id} must be between {-BIAS_MAX:g} and {BIAS_MAX:g}",
                f"sampling.logit_bias.{token_id}",
            )
    return None


def vocabulary_problem(sampling: Sampling, prompt_token_ids: tuple[int, ...] | None, vocab_size: int) -> Problem | None:
    """The first token id that the model doesn't have, or None. Ids run from 0 to `vocab_size` - 1."""
    groups: tuple[tuple[str, Iterable[tuple[object, int]]], ...] = (
        ("prompt_token_ids[{}]", enumerate(prompt_token_ids or ())),
        ("sampling.stop_token_ids[{}]", enumerate(sampling.stop_token_ids)),
        ("sampling.logit_bias.{}", ((text, int(text)) for text in sampling.logit_bias)),
    )
    if prompt_token_ids and min(prompt_token_ids) >= 0 and max(prompt_token_ids) < vocab_size:
        groups = groups[1:]  # there may be millions of them
    for form, ids in groups:
        for place, token_id in ids:
            if not 0 <= token_id < vocab_size:
                param = form.format(place)
                name = param.removeprefix("sampling.")
                return Problem(
                    f"{name}: the model has no token {token_id}; its ids run from 0 to {vocab_size - 1}", param
                )
    return None
