"""Asking for a stream, leaving it, and coming back for the rest."""

from __future__ import annotations

from typing import Any

import httpx

from tests.bridge.conftest import RunningBridge
from tests.bridge.test_openai_chat import body, read_events, script
from tests.bridge.told import Events, some_events

DONE = (None, "[DONE]")
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


async def resume(
    bridge: RunningBridge,
    stream: str,
    last: str | None = None,
    key: str | None = None,
    until: int | None = None,
    **params: Any,
) -> tuple[httpx.Response, Events]:
    headers = {} if last is None else {"Last-Event-ID": last}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    async with (
        bridge.client() as client,
        client.stream("GET", f"/v1/streams/{stream}", headers=headers, params=params) as response,
    ):
        if response.status_code != 200:
            await response.aread()
            return response, []
        return response, await (read_events(response) if until is None else some_events(response, until))


def ids(events: Events) -> list[str]:
    return [event_id for event_id, _ in events if event_id is not None]


def kept(events: Events) -> Events:
    return [event for event in events if not event[1].startswith(":")]


async def ask(bridge: RunningBridge, path: str, payload: dict[str, Any]) -> tuple[str, Events]:
    async with bridge.client() as client, client.stream("POST", path, json=payload) as response:
        return response.headers["x-request-id"], kept(await read_events(response))


async def broken_off(bridge: RunningBridge, mark: str, count: int, **directions: Any) -> tuple[str, Events]:
    """A stream whose caller leaves after so many events with an id, and wants to come back."""
    payload = body(messages=script(mark=mark, **directions), **USAGE)
    headers = {"X-Headrace-On-Disconnect": "continue"}
    async with (
        bridge.client() as client,
        client.stream("POST", "/v1/chat/completions", json=payload, headers=headers) as response,
    ):
        return response.headers["x-request-id"], await some_events(response, count)
