"""Callers that don't give up: each follows its streams to their end, at whichever front door there is, and checks what it is told."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bridge.told import Events, Frames, Told
from tests.system.running import TENANTS, script

STREAM_S_MAX = 150.0
"""A stream that hasn't ended by then was left hanging."""
READ_S_MAX = 40.0
"""No event and no keep-alive for so long: the connection is dead."""
RETRY_S = 0.5
ASKS_MAX = 200
TRY_AGAIN = (429, 503, 504)
CONTINUE = {"x-headrace-on-disconnect": "continue"}


@dataclass
class Followed:
    """One stream as its caller saw it, over all its connections. `fault` is what should not have happened, or empty; `met` what he met at which
    front door, in turn.
    """

    text: str
    request_id: str = ""
    events: Events = field(default_factory=list)
    connections: int = 0
    fault: str = ""
    met: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Sets `fault` unless the stream told its whole text once, in order."""
        if self.fault:
            return
        try:
            told = Told().hear(self.events)
        except (AssertionError, ValueError, KeyError) as error:
            self.fault = f"makes no sense: {error!r}"
            return
        offsets = [_offset(event_id, self.request_id) for event_id, _ in self.events if event_id is not None]
        if told.texts != {0: self.text}:
            self.fault = f"told {told.texts}"
        elif told.ends != {0: "stop"} or len(told.heads) != 1 or told.roles != 1:
            self.fault = f"ends {told.ends}, heads {told.heads}, roles {told.roles}"
        elif None in offsets or any(a >= b for a, b in itertools.pairwise(filter(None, offsets))):
            self.fault = f"the ids go back: {offsets}"


def _offset(event_id: str, request_id: str) -> int | None:
    """Where an event's id stands in the log; None if it is another request's."""
    named, _partition, offset, *_ = event_id.split(":")
    return int(offset) + 1 if named == request_id else None


class Followers:
    """So many callers, each with one stream after another."""

    def __init__(self, urls: Sequence[str], keys: dict[str, str], model: str, *, chunks: int, token_ms: int) -> None:
        """`chunks` are the parts of each answer, which come `token_ms` apart."""
        self._urls = list(urls)
        self._keys = [keys[tenant] for tenant in TENANTS]
        self._model = model
        self._chunks = chunks
        self._token_ms = token_ms
        self._stopping = asyncio.Event()
        self.streams: list[Followed] = []
        self.refused: Counter[int] = Counter()
        self.open = 0

    @property
    def flowing(self) -> int:
        """How many streams have told something so far."""
        return sum(bool(one.events) for one in self.streams)

    @contextmanager
    def calling(self, loop: asyncio.AbstractEventLoop, callers: int) -> Iterator[None]:
        """So many callers read while the block runs, and then see their last streams to their end."""
        reading = asyncio.run_coroutine_threadsafe(self.run(callers), loop)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self._stopping.set)
            reading.result(STREAM_S_MAX + 10)

    async def run(self, callers: int) -> None:
        """Returns when every caller's last stream is over, whatever became of it."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(READ_S_MAX, connect=5.0)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as http:
            await asyncio.gather(*(self._caller(http, number) for number in range(callers)))

    async def _caller(self, http: httpx.AsyncClient, number: int) -> None:
        doors = itertools.cycle(self._urls[number % len(self._urls) :] + self._urls[: number % len(self._urls)])
        key = self._keys[number // len(self._urls) % len(self._keys)]
        for turn in itertools.count():
            if self._stopping.is_set():
                return
            followed = Followed(f"{number}.{turn}é, " * self._chunks)
            self.streams.append(followed)
            self.open += 1
            try:
                async with asyncio.timeout(STREAM_S_MAX):
                    await _Following(self, http, followed, key).follow(doors)
            except TimeoutError:
                followed.fault = f"left hanging after {followed.connections} connections, {len(followed.events)} events: {followed.met[-6:]}"
            except Exception as error:
                followed.fault = f"{error!r}"
            finally:
                self.open -= 1
            followed.check()

    def body(self, text: str) -> dict[str, Any]:
        """What is asked for."""
        part = text[: len(text) // self._chunks]
        content = script(tokens=[part], repeat=self._chunks, token_ms=self._token_ms)
        return {"model": self._model, "messages": [{"role": "user", "content": content}], "stream": True}


class _Following:
    """One stream's connections."""

    def __init__(self, followers: Followers, http: httpx.AsyncClient, followed: Followed, key: str) -> None:
        self._followers = followers
        self._http = http
        self._followed = followed
        self._headers = {"authorization": f"Bearer {key}", **CONTINUE}

    async def follow(self, doors: Any) -> None:
        followed = self._followed
        for _ in range(ASKS_MAX):
            door = next(doors)
            followed.met.append(door)
            try:
                async with self._connect(door) as answer:
                    if await self._hear(answer):
                        return
            except httpx.TransportError as error:
                followed.met.append(repr(error))
            await asyncio.sleep(RETRY_S)
        followed.fault = "asked too often"

    def _connect(self, door: str) -> Any:
        """Asks, or comes back for what follows the last event that has an id; what came after it will come again."""
        followed = self._followed
        if not followed.request_id:
            body = self._followers.body(followed.text)
            return self._http.stream("POST", f"{door}/v1/chat/completions", json=body, headers=self._headers)
        while followed.events and followed.events[-1][0] is None:
            followed.events.pop()
        headers = dict(self._headers)
        if followed.events:
            headers["last-event-id"] = followed.events[-1][0] or ""
        return self._http.stream("GET", f"{door}/v1/streams/{followed.request_id}", headers=headers)

    async def _hear(self, answer: httpx.Response) -> bool:
        """Whether the stream is over, in whatever way."""
        followed = self._followed
        if answer.status_code != 200:
            await answer.aread()
            self._followers.refused[answer.status_code] += 1
            followed.met.append(f"{answer.status_code} {answer.text}")
            if answer.status_code in TRY_AGAIN:
                return False
            followed.fault = f"{answer.status_code}: {answer.text}"
            return True
        followed.request_id = answer.headers["x-request-id"]
        followed.connections += 1
        frames = Frames()
        async for line in answer.aiter_lines():
            if (event := frames.take(line)) is not None:
                data = event[1]
                if data.startswith('{"error"'):
                    if '"unavailable"' in data:
                        return False
                    followed.fault = data
                    return True
                followed.events.append(event)
                if data == "[DONE]":
                    return True
        return False
