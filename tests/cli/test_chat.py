"""The client side of a streamed answer, against a made-up front door."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from cli.chat import Answer, ask, first_model
from cli.main import cli
from schemas.errors import HeadraceError
from schemas.reasons import Reason

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> httpx.Client:
    return httpx.Client(base_url="http://front-door", transport=httpx.MockTransport(handler))


def events(*data: Any) -> bytes:
    lines = [f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in data]
    return (": keep-alive\n\nid: 1\n" + "".join(lines)).encode()


def delta(text: str | None, **more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"delta": {"content": text} if text is not None else {}, **more}]}


def test_pieces_usage_and_times() -> None:
    asked: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        usage = {"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 3}}
        body = events(
            delta(""),
            delta("a"),
            delta("b\n"),
            delta(None, finish_reason="stop"),
            usage,
            "[DONE]",
            delta("after the end"),
        )
        return httpx.Response(200, content=body, headers={"x-request-id": "the-id"})

    answer = Answer()
    with client(handler) as http:
        assert list(ask(http, {"model": "m"}, answer)) == ["a", "b\n"]
    assert asked == [{"model": "m", "stream": True, "stream_options": {"include_usage": True}}]
    assert (answer.text, answer.request_id, answer.finish_reason) == ("ab\n", "the-id", "stop")
    assert answer.first_token_s is not None
    assert answer.first_token_s <= answer.total_s
    assert answer.timings().startswith("3 tokens in ")


def test_a_refusal_has_the_front_doors_words() -> None:
    error = {"error": {"code": "model_not_found", "message": "there is no model 'x'"}}
    with client(lambda _: httpx.Response(404, json=error)) as http, pytest.raises(HeadraceError) as refused:
        list(ask(http, {}, Answer()))
    assert refused.value.reason is Reason.MODEL_NOT_FOUND
    assert refused.value.message == "404: there is no model 'x'"


def test_a_stream_that_ends_in_an_error_says_so() -> None:
    body = events(delta("a"), {"error": {"code": "engine_error", "message": "the model failed"}})
    with (
        client(lambda _: httpx.Response(200, content=body)) as http,
        pytest.raises(HeadraceError, match="the model failed"),
    ):
        list(ask(http, {}, Answer()))


def test_a_stream_without_its_end_is_no_answer() -> None:
    with (
        client(lambda _: httpx.Response(200, content=events(delta("a")))) as http,
        pytest.raises(HeadraceError, match="broke off"),
    ):
        list(ask(http, {}, Answer()))


@pytest.mark.parametrize("content", [b"", b"<html>bad gateway</html>", b"[]", b'{"error": "text"}'])
def test_an_answer_from_something_else_is_no_traceback(content: bytes) -> None:
    with (
        client(lambda _: httpx.Response(502, content=content)) as http,
        pytest.raises(HeadraceError, match="answered 502"),
    ):
        list(ask(http, {}, Answer()))


def test_the_first_model_that_talks_is_the_default() -> None:
    takes = {"embeds": "text", "m": "text_input", "n": "text_input"}

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in takes]})
        return httpx.Response(200, json={"inputs": [{"name": takes[request.url.path.rpartition("/")[2]]}]})

    with client(handler) as http:
        assert first_model(http) == "m"
        del takes["m"], takes["n"]
        with pytest.raises(HeadraceError, match="no model that talks"):
            first_model(http)
    with (
        client(lambda _: httpx.Response(200, json={"data": []})) as http,
        pytest.raises(HeadraceError, match="no model is served"),
    ):
        first_model(http)


def test_a_key_that_no_header_takes_is_told_of() -> None:
    result = CliRunner().invoke(cli, ["chat", "--key", "schlüssel", "--message", "hi"])
    assert isinstance(result.exception, HeadraceError)
    assert result.exception.reason is Reason.INVALID_API_KEY
