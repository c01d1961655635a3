"""Renders a chat to a prompt with a model's own template, as Hugging Face's `apply_chat_template` does.

Templates come with a model, never from a caller, and still run in Jinja's sandbox. A template that asks for the date
gets the time it is given, so that a replay renders the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import HeadraceError
from schemas.reasons import Reason
from text.tokenizer import Tokenizer, valid_unicode

CACHED_TEMPLATES = 32


class ChatMessage(Protocol):
    """One message of a chat, such as `schemas.events.Message`."""

    @property
    def role(self) -> str:
        """Who speaks: `system`, `user`, `assistant`, …"""

    @property
    def content(self) -> str:
        """What is said."""

    @property
    def name(self) -> str | None:
        """The speaker's name, which few templates show."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    now_ms: int | None = None,
) -> str:
    """The prompt for `messages`.

    `now_ms` (milliseconds since 1970) is the time that the template's `strftime_now` tells, in UTC; without it that
    function isn't defined, and templates that ask first fall back to a fixed date.

    Raises HeadraceError: invalid_request when the model has no chat template or its template refuses these messages;
    internal_error when the template itself is broken.
    """
    if tokenizer.chat_template is None:
        text = "the model has no chat template; send a prompt instead"
        raise HeadraceError(Reason.INVALID_REQUEST, text, param="messages")
    for place, message in enumerate(messages):
        _check_message(message, place)
    template = _compile(tokenizer.chat_template)
    values: dict[str, Any] = {
        **tokenizer.special_tokens,
        "messages": [_as_dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    if now_ms is not None:
        values["strftime_now"] = _strftime(now_ms)
    try:
        return template.render(values)
    except Exception as error:  # a template may run into any error over messages that it didn't expect
        text = f"the model's chat template refuses these messages: {error}"
        raise HeadraceError(Reason.INVALID_REQUEST, text, param="messages") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    now_ms: int | None = None,
) -> list[int]:
    """Token ids of the prompt for `messages`. The template writes the special tokens, so none are added."""
    prompt = render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt, now_ms=now_ms)
    return tokenizer.encode(prompt, add_special_tokens=False)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is the text alone."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    # Templates are written for these settings, which Hugging Face fixed. The prompt is no HTML, so nothing is escaped.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        template = environment.from_string(source)
        # They are copied for each prompt, and jinja2 keeps them as a chain of dictionaries, whose copy takes half of a short prompt's time.
        template.globals = dict(template.globals)
        return template
    except jinja2.TemplateSyntaxError as error:
        text = f"the model's chat template is broken at line {error.lineno}: {error}"
        raise HeadraceError(Reason.INTERNAL_ERROR, text) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(now_ms: int) -> Callable[[str], str]:
    return lambda form: datetime.fromtimestamp(now_ms / 1000, UTC).strftime(form)


def _as_dict(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else {**fields, "name": message.name}


def _check_message(message: ChatMessage, place: int) -> None:
    for field, text in (("role", message.role), ("content", message.content), ("name", message.name or "")):
        try:
            valid_unicode(text)
        except HeadraceError as error:
            raise HeadraceError(error.reason, error.message, param=f"messages[{place}].{field}") from error
