"""Triton's generate extension: `{"text_input": …, "parameters": {…}}` in, `{"text_output": …}` out, at once or as server-sent events.

Fields beside `text_input` are parameters too. Events have no ids: a stream that shall outlive its connection is asked for at `/v1`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bridge.answer_headers import answer_headers
from bridge.inference.asking import Answer, Ask, Scalar
from bridge.inference.elements import invalid
from bridge.inference.models import EXCLUDE_INPUT, SAMPLING_PARAMETERS, STREAM, TEXT_INPUT, TEXT_OUTPUT
from bridge.inference.rest_requests import read_id, read_json, scalars
from bridge.inference.serving import Serving
from bridge.servers import abort
from infra.settings import BridgeSettings
from schemas.errors import HeadraceError
from schemas.parts import Tensor
from schemas.tensors import strings, texts

_ELSEWHERE = f"is no string, number or boolean: put it into {SAMPLING_PARAMETERS}, a string that is a JSON object"


def read_generate(raw: bytes, request: Request, *, stream: bool = False) -> Ask:
    """What a body asks; `stream` is the path's word. Raises HeadraceError (invalid_request)."""
    body = read_json(raw)
    prompt = body.pop(TEXT_INPUT, None)
    if not isinstance(prompt, str):
        raise invalid(f"{TEXT_INPUT} must be a string", TEXT_INPUT)
    name = read_id(body.pop("id", None))
    nested = body.pop("parameters", None)
    parameters: dict[str, Scalar] = {**scalars(nested, "parameters", _ELSEWHERE), **scalars(body, "body", _ELSEWHERE)}
    if parameters.setdefault(STREAM, stream) is not stream:
        raise invalid(
            f"{STREAM} must be {str(stream).lower()} here; {'generate' if stream else 'generate_stream'} is for the other",
            STREAM,
        )
    parameters.setdefault(EXCLUDE_INPUT, True)
    path = request.path_params
    return Ask(path["model"], path.get("version", ""), name, parameters, (texts(TEXT_INPUT, [prompt]),))


def _object(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if answer.id:
        found["id"] = answer.id
    output: Tensor = next(tensor for tensor in answer.outputs if tensor.name == TEXT_OUTPUT)
    values = strings(output)
    return {**found, TEXT_OUTPUT: values[0] if len(values) == 1 else values}


class GenerateResponse(Response):
    """Streams a request whose verdict is in. `finish` is called when it is over, however it ends."""

    def __init__(self, ask: Ask, serving: Serving, finish: Callable[[], None], settings: BridgeSettings) -> None:
        self._ask = ask
        self._serving = serving
        self._finish = finish
        self._stall_s = settings.reader_stall_ms / 1000
        call = serving.call
        super().__init__(
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **answer_headers(call),
            },
            media_type="text/event-stream",
        )
        del self.headers["content-length"]

    @staticmethod
    def whole(_ask: Ask, answer: Answer) -> tuple[bytes, dict[str, str]]:
        """The answer at once."""
        return orjson.dumps(_object(answer)), {"Content-Type": "application/json"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI hands it in
        """Serve."""
        call = self._serving.call
        call.on_slow = lambda: abort(scope)
        try:
            await self._write(send, type="http.response.start", status=200, headers=self.raw_headers)
            try:
                async for answer in self._serving.parts():
                    await self._write(send, type="http.response.body", body=_event(_object(answer)), more_body=True)
            except HeadraceError as error:
                await self._write(
                    send, type="http.response.body", body=_event({"error": error.message}), more_body=True
                )
            await self._write(send, type="http.response.body", body=b"", more_body=False)
        except TimeoutError:
            call.fail_slow()
            abort(scope)
        finally:
            call.on_slow = None
            self._finish()

    async def _write(self, send: Send, **message: Any) -> None:
        call = self._serving.call
        call.sending = True
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        finally:
            call.sending = False


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
