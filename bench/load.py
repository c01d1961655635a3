"""The load: a closed loop of streamed calls to an OpenAI-compatible endpoint, and what a caller sees of it.

Every peer gets the same. A closed loop keeps `concurrency` calls open: each caller asks again when its answer is whole. Time to first
token runs from before the request is sent to the first event that holds text, which the role's opening event of a chat does not.
Inter-token latency is a stream's time from the first to the last event with text, over the tokens after the first, so that merging
several tokens into one event gains nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import orjson

from schemas.errors import HeadraceError
from schemas.reasons import Reason

CALL_TIMEOUT_S = 300.0
ERROR_CHARS = 300
Hear = Callable[[float, str], None]
"""Is told of each event with text: when it came, in seconds since 1970, and the text."""
_DATA = b"data: "
_END = b"[DONE]"


@dataclass(slots=True)
class Sample:
    """One call. Times are seconds since 1970, of a clock that doesn't jump; None where nothing came."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    request_id: str = ""
    error: str | None = None

    @property
    def ttft_ms(self) -> float:
        """From sending to the first text."""
        assert self.first_s is not None
        return (self.first_s - self.sent_s) * 1000

    @property
    def itl_ms(self) -> float | None:
        """The mean time between tokens; None for an answer of one token."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) * 1000 / (self.tokens - 1)


@dataclass(slots=True)
class Result:
    """What came of a load: every call, and how long all of it took."""

    concurrency: int
    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def good(self) -> list[Sample]:
        """The calls that were answered whole."""
        return [sample for sample in self.samples if sample.error is None]

    @property
    def errors(self) -> list[str]:
        """What went wrong with the others."""
        return [sample.error for sample in self.samples if sample.error is not None]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all calls over the wall time."""
        return sum(sample.tokens for sample in self.good) / self.wall_s

    def ttft_ms(self, quantile: float) -> float:
        """A quantile of the time to first token."""
        return percentile([sample.ttft_ms for sample in self.good], quantile)

    def itl_ms(self, quantile: float) -> float:
        """A quantile over calls of their mean inter-token latency."""
        return percentile([itl for sample in self.good if (itl := sample.itl_ms) is not None], quantile)

    def require_good(self) -> Result:
        """Itself. Raises HeadraceError (unavailable) if a call failed: figures of a run with errors mean nothing."""
        if self.errors:
            text = f"{len(self.errors)} of {len(self.samples)} calls failed, the first with: {self.errors[0]}"
            raise HeadraceError(Reason.UNAVAILABLE, text)
        return self


def percentile(values: Sequence[float], quantile: float) -> float:
    """The quantile (0 to 1), interpolated between neighbours. Raises ValueError for no values."""
    if not values:
        raise ValueError("there are no values")
    ordered = sorted(values)
    place = quantile * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def pooled(results: Sequence[Result]) -> Result:
    """Several passes at one concurrency as one: all calls, over the sum of their times."""
    samples = [sample for result in results for sample in result.samples]
    return Result(results[0].concurrency, samples, sum(result.wall_s for result in results))


_EPOCH_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since 1970 by a clock that doesn't jump: it compares with the broker's timestamps on the same machine."""
    return _EPOCH_S + time.monotonic()


class Client:
    """Calls one endpoint, such as `http://127.0.0.1:8000/v1/completions`. Use as an async context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Connects when first used, and keeps its connections."""
        self._url = url
        # What is measured is generated, whatever response cache the model has.
        self._headers = {"Cache-Control": "no-cache, no-store"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, body: bytes, hear: Hear | None = None) -> Sample:
        """One streamed call. What goes wrong is in the sample; `hear` is told of its text."""
        assert self._session is not None
        sample = Sample(now_s())
        try:
            async with self._session.post(
                self._url, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:ERROR_CHARS]
                    sample.error = f"status {response.status}: {text}"
                    return sample
                await _read(response.content, sample, hear)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        return sample


async def _read(content: aiohttp.StreamReader, sample: Sample, hear: Hear | None) -> None:
    """Reads a stream of events to its end into the sample."""
    rest, done = b"", False
    while chunk := await content.readany():
        at_s = now_s()
        *lines, rest = (rest + chunk).split(b"\n")
        for data in _data(lines):
            if data == _END:
                done = True
                continue
            event: dict[str, Any] = orjson.loads(data)
            if "error" in event:
                sample.error = str(event["error"])[:ERROR_CHARS]
            else:
                _take(event, at_s, sample, hear)
    if sample.error is None and not done:
        sample.error = "the stream ended before [DONE]"
    elif sample.error is None and sample.first_s is None:
        sample.error = "the answer held no text"


def _data(lines: list[bytes]) -> Iterator[bytes]:
    return (line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA))


def _take(event: dict[str, Any], at_s: float, sample: Sample, hear: Hear | None) -> None:
    if not sample.request_id:
        sample.request_id = str(event.get("id", ""))
    if (usage := event.get("usage")) is not None:
        sample.tokens = usage["completion_tokens"]
    for choice in event.get("choices", ()):
        if text := choice.get("text") or choice.get("delta", {}).get("content"):
            sample.last_s = at_s
            if sample.first_s is None:
                sample.first_s = at_s
            if hear is not None:
                hear(at_s, text)


async def closed_loop(client: Client, concurrency: int, calls: int, body: Callable[[int], bytes]) -> Result:
    """Makes `calls` calls, `concurrency` at a time; `body(n)` is the n-th one's body."""
    result = Result(concurrency)
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            result.samples.append(await client.call(body(number)))

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, calls)):
            group.create_task(caller())
    result.wall_s = time.monotonic() - began_s
    return result
