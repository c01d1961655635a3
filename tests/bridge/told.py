"""What a stream of server-sent events says, however it is cut into chunks: two streams that tell the same are equal."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

Event = tuple[str | None, str]
"""Id and data; comments have no id and begin with a colon."""
Events = list[Event]


class Frames:
    """Makes a stream's events of its lines, as they come."""

    def __init__(self) -> None:
        self._id: str | None = None

    def take(self, line: str) -> Event | None:
        """The event whose data the line is; None for every other line."""
        if line.startswith("id: "):
            self._id = line[4:]
        if not line.startswith("data: "):
            return None
        event, self._id = (self._id, line[6:]), None
        return event


@dataclass
class Told:
    """What a stream's events say, however they are cut."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    usages: list[Any] = field(default_factory=list)
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    roles: int = 0

    def hear(self, events: Events) -> Told:
        for _, data in events:
            if data != "[DONE]" and not data.startswith(":"):
                self._hear(json.loads(data))
        return self

    def _hear(self, chunk: dict[str, Any]) -> None:
        self.heads.add(tuple(chunk[name] for name in ("id", "object", "created", "model", "system_fingerprint")))
        if not chunk["choices"]:
            self.usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            self.texts[index] = self.texts.get(index, "") + (delta.get("content") or choice.get("text") or "")
            if choice["logprobs"] is not None:
                self.logprobs.setdefault(index, []).extend(_tokens(choice["logprobs"]))
            if choice["finish_reason"] is not None:
                assert index not in self.ends
                self.ends[index] = choice["finish_reason"]


def _tokens(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True))


async def some_events(response: httpx.Response, count: int) -> Events:
    """A stream's events up to the last of so many with an id; the rest is left unread."""
    events: Events = []
    frames = Frames()
    lines = cast(AsyncGenerator[str], response.aiter_lines())
    async with aclosing(lines):
        async for line in lines:
            if (event := frames.take(line)) is not None:
                events.append(event)
                count -= event[0] is not None
                if count == 0:
                    break
    return events
