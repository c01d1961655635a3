"""What callers may send to small models, `/v1/embeddings` in OpenAI's words, strictly: see `openai_models`."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from bridge.openai_models import Strict
from decisions.validation import USER_CHARS_MAX

ITEMS_MAX = 2_048
"""Inputs of one call, as OpenAI has it."""
TOKEN_ID_MAX = (1 << 31) - 1
_BASE64 = "base64"
_TEXTS = "a string, a list of strings, token ids, or a list of token ids"
_THINGS = 'a string, {{"base64": "…"}}, a list of these, token ids, or a list of token ids'


def _fault(text: str, at: str = "", **context: Any) -> PydanticCustomError:
    return PydanticCustomError("input", text, {"at": at, **context})


def _listed(value: Any, forms: str = _TEXTS) -> list[Any]:
    """One item, or a list of them, as a list of 1 to `ITEMS_MAX`. `forms` says what may be given."""
    single = isinstance(value, str | dict) or (isinstance(value, list) and value and type(value[0]) is int)
    items = [value] if single else value
    if not isinstance(items, list):
        raise _fault(f"must be {forms}")
    if not items:
        raise _fault("is empty")
    if len(items) > ITEMS_MAX:
        raise _fault("{count} inputs are given; at most {most} are taken", count=len(items), most=ITEMS_MAX)
    return items


def _at(value: Any, index: int) -> str:
    return f"[{index}]" if isinstance(value, list) and type(value[0]) is not int else ""


def _texts(value: Any) -> list[Any]:
    """Texts, or the token ids of texts; none is empty."""
    items = _listed(value)
    kind = type(items[0])
    for index, item in enumerate(items):
        at = _at(value, index)
        if kind not in (str, list) or type(item) is not kind:
            raise _fault("must be a string or a list of token ids, as the others are", at)
        if not item:
            raise _fault("is empty", at)
        if kind is list:
            for place, token_id in enumerate(item):
                if type(token_id) is not int or not 0 <= token_id <= TOKEN_ID_MAX:
                    raise _fault("must be a token id", f"{at}[{place}]")
    return items


def _things(value: Any) -> list[Any]:
    """Texts, token ids, or bytes: `{"base64": …}`. Which of these a model takes is looked at later."""
    items = _listed(value, _THINGS)
    if type(items[0]) is list or (type(items[0]) is str and all(type(item) is str for item in items)):
        return items if type(items[0]) is str else _texts(value)
    return [_thing(item, _at(value, index)) for index, item in enumerate(items)]


def _thing(item: Any, at: str) -> str | bytes:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict) or list(item) != [_BASE64] or not isinstance(item[_BASE64], str):
        raise _fault('must be a string or {{"base64": "…"}}', at)
    try:
        return base64.b64decode(item[_BASE64], validate=True)
    except (binascii.Error, ValueError):
        raise _fault("is not base64", f"{at}.{_BASE64}") from None


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_FORMS: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1},
    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": ITEMS_MAX},
    {**_IDS, "minItems": 1},
    {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1, "maxItems": ITEMS_MAX},
]
_BYTES_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {_BASE64: {"type": "string", "contentEncoding": "base64"}},
    "required": [_BASE64],
    "additionalProperties": False,
}
_THING_FORMS = [
    *_TEXT_FORMS,
    _BYTES_FORM,
    {"type": "array", "items": {"anyOf": [{"type": "string"}, _BYTES_FORM]}, "minItems": 1, "maxItems": ITEMS_MAX},
]
Texts = Annotated[list[Any], BeforeValidator(_texts), WithJsonSchema({"anyOf": _TEXT_FORMS})]
Things = Annotated[list[Any], BeforeValidator(_things), WithJsonSchema({"anyOf": _THING_FORMS})]
User = Annotated[str, Field(max_length=USER_CHARS_MAX)]
Timeout = Annotated[float, Field(gt=0, le=86_400)]


class EmbeddingRequest(Strict):
    """`POST /v1/embeddings`. All inputs of a call travel together, as one request in the log. `dimensions` cuts each embedding to so many numbers
    and makes it of length 1 again; `base64` is of little-endian 32-bit floats. `timeout` (seconds) is Headrace's own.
    """

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    user: User | None = None
    timeout: Timeout | None = None


class ClassificationRequest(Strict):
    """`POST /v1/classifications`. A text classifier takes texts, or their token ids; a classifier of bytes takes bytes. Either may be given as
    `{"base64": …}`, and a text stands for its UTF-8 bytes. The `top_k` likeliest classes of each input come back, best first; 5 if it isn't said.
    """

    model: str
    input: Things
    top_k: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    user: User | None = None
    timeout: Timeout | None = None
