"""Writes one attempt's events to the caller's `tokens` partition, in order, merging what the broker hasn't taken yet.

Few sends are in flight at once; tokens made meanwhile go out together, so a slow broker costs larger chunks and never memory. While another
may be about to take over, the attempt is released, and goes on: readers stop at the other's marker.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace

from infra.log import EventProducer, Headers, RecordTooLarge
from infra.objects import StoreAway
from schemas.errors import HeadraceError
from schemas.events import (
    Attempt,
    ChoiceEnd,
    Event,
    GenerationReleased,
    GenerationStarted,
    InferenceCompleted,
    InferenceFailed,
    InferenceScheduled,
    Tensor,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.reasons import Reason

START_LINGER_S = 0.005
"""How long the start waits for the first tokens, to travel with them. That of tensors, which have none, waits as long as chunks that nobody watches:
most runs are over by then."""
IN_FLIGHT_MAX = 4
"""Sends of one answer that the broker may have yet to confirm."""
PENDING_TOKENS_MAX = 512
"""Tokens of one choice that wait for a send; beyond that, generation waits."""
RECORD_TOKENS_MAX = 512
RECORD_LOGPROB_TOKENS_MAX = 64
MESSAGE_CHARS_MAX = 1_000
"""An engine's error may quote the request; no more than this of it travels, or no record might take it."""
WHOLE_TOKENS = 64
"""An answer that nobody watches goes out in chunks of this many tokens,"""
WHOLE_LINGER_S = 0.25
"""or after this long."""


@dataclass(slots=True)
class _Choice:
    sent: int = 0
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    flushed_s: float = 0.0


class Answer:
    """One attempt's side of the stream. Any send that fails makes the next call raise: the worker can't go on without the log."""

    def __init__(
        self,
        producer: EventProducer,
        work: InferenceScheduled,
        attempt: Attempt,
        worker_id: str,
        headers: Headers,
        linger_ms: int = 0,
    ) -> None:
        """Nothing is written before `start`."""
        self._producer = producer
        self._work = work
        self.attempt = attempt
        self._worker_id = worker_id
        self._headers = headers
        self._linger_s = linger_ms / 1000
        self._choices: list[_Choice] = []
        self._in_flight: deque[asyncio.Future[object]] = deque()
        self._lock = asyncio.Lock()
        self._begun: GenerationStarted | None = None
        self._announced = False
        self._released = self._told_released = False
        self._timer: asyncio.TimerHandle | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._failure: HeadraceError | None = None

    @property
    def totals(self) -> tuple[int, ...]:
        """For each choice, the tokens made so far, sent or not."""
        return tuple(choice.sent + len(choice.ids) for choice in self._choices)

    def start(self, from_tokens: tuple[int, ...], queue_ms: float) -> None:
        """Generation starts, or goes on, from these tokens. That is written with the first of the tokens, or soon."""
        work = self._work
        flushed_s = 0.0 if work.stream else time.monotonic()
        self._choices = [_Choice(sent=count, flushed_s=flushed_s) for count in from_tokens]
        self._begun = GenerationStarted(
            work.request_id, work.tenant, work.model, work.version, work.tier, self.attempt, from_tokens, work.prompt_tokens or len(work.prompt_token_ids), self._worker_id, queue_ms, work.sampling,
            None if any(from_tokens) else work.rates, work.cache_key,
        )  # fmt: skip
        linger_s = START_LINGER_S if work.inputs is None else WHOLE_LINGER_S
        self._timer = asyncio.get_running_loop().call_later(linger_s, self._announce_beside)

    async def started(self) -> None:
        """Returns when the broker has confirmed the start."""
        await self._announce()
        await self._settle(0)

    def close(self) -> None:
        """Nothing more is written by itself."""
        if self._timer is not None:
            self._timer.cancel()
        if self._announcing is not None:
            self._announcing.cancel()

    def _announce_beside(self) -> None:
        self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        async with self._lock:
            with suppress(HeadraceError):  # whoever writes next is told
                await self._begin()

    async def _begin(self) -> None:
        """Writes the start, once. The lock is held."""
        if self._begun is not None and not self._announced:
            await self._send(self._begun)
            self._announced = True
            if self._timer is not None:
                self._timer.cancel()
            await self._tell_standing()

    async def add(self, index: int, ids: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...] | None) -> bool:
        """Takes new tokens of a choice and the text they release. True if they have been sent, or sent off, at once."""
        choice = self._choices[index]
        choice.ids.extend(ids)
        choice.texts.append(text)
        if logprobs is not None:
            choice.logprobs.extend(logprobs)
        while len(choice.ids) >= PENDING_TOKENS_MAX:
            await self._settle(IN_FLIGHT_MAX - 1)
            await self._flush(index)
        if not self._due(choice):
            return False
        await self._flush(index)
        return not choice.ids

    def _due(self, choice: _Choice) -> bool:
        if not choice.ids:
            return False
        waited_s = time.monotonic() - choice.flushed_s
        self._trim()
        if not self._work.stream:
            return len(choice.ids) >= WHOLE_TOKENS or waited_s >= WHOLE_LINGER_S
        return waited_s >= self._linger_s and len(self._in_flight) < IN_FLIGHT_MAX

    async def _flush(self, index: int) -> None:
        """Sends what a choice holds."""
        choice = self._choices[index]
        async with self._lock:
            if choice.ids:
                await self._begin()
            while choice.ids:
                count = min(len(choice.ids), RECORD_LOGPROB_TOKENS_MAX if choice.logprobs else RECORD_TOKENS_MAX)
                # The text belongs after the last of its tokens. More of both may come while this is sent.
                texts = len(choice.texts) if count == len(choice.ids) else 0
                logprobs = tuple(choice.logprobs[:count]) or None
                await self._send(
                    TokensGenerated(
                        self._work.request_id,
                        index,
                        self.attempt,
                        choice.sent,
                        tuple(choice.ids[:count]),
                        "".join(choice.texts[:texts]),
                        logprobs,
                    )
                )
                # Only now: a send that is cancelled has sent nothing.
                choice.sent += count
                del choice.ids[:count], choice.logprobs[:count], choice.texts[:texts]
                choice.flushed_s = time.monotonic()

    async def complete(
        self, ends: tuple[ChoiceEnd, ...], usage: Usage, timings: Timings, outputs: tuple[Tensor, ...] = ()
    ) -> None:
        """Writes the ending; returns when the broker has confirmed all of it."""
        work = self._work
        await self._end(
            InferenceCompleted(
                work.request_id,
                work.tenant,
                work.model,
                work.version,
                work.tier,
                self.attempt,
                ends,
                usage,
                timings,
                self._worker_id,
                outputs,
            )
        )

    async def fail(self, reason: Reason, message: str, usage: Usage | None = None) -> None:
        """Writes a failed ending; returns when the broker has confirmed all of it."""
        work = self._work
        # The totals are taken once everything is flushed, so they are right whatever was pending.
        await self._end(
            InferenceFailed(
                work.request_id,
                work.tenant,
                work.model,
                work.version,
                work.tier,
                reason.value,
                message[:MESSAGE_CHARS_MAX],
                self.attempt,
                self.totals,
                usage=usage,
            )
        )

    def give_up(self) -> None:
        """Forgets the tokens that aren't sent: they can't be."""
        for choice in self._choices:
            choice.ids.clear()
            choice.texts.clear()
            choice.logprobs.clear()

    async def _end(self, event: Event) -> None:
        for index in range(len(self._choices)):
            await self._flush(index)
        async with self._lock:
            await self._begin()
            await self._send(event)
        await self._settle(0)

    async def release(self) -> None:
        """Says that another may take over soon, and goes on; returns when the broker has confirmed it. Does so once, until `keep`."""
        self._released = True
        async with self._lock:
            confirmed = await self._tell_standing()
        if confirmed is not None:
            await asyncio.shield(confirmed)

    async def keep(self) -> None:
        """Nobody took over: the attempt is this worker's as before."""
        self._released = False
        async with self._lock:
            with suppress(HeadraceError):  # whoever writes next is told
                await self._tell_standing()

    async def hand_over(self) -> None:
        """Writes what is left, released, once nothing more is made; returns when the broker has confirmed all of it."""
        for index in range(len(self._choices)):
            await self._flush(index)
        await self.release()
        await self._settle(0)

    async def _tell_standing(self) -> asyncio.Future[object] | None:
        """Writes what changed since it was last written: another release, or the same start again. The lock is held."""
        if self._begun is None or not self._announced or self._released == self._told_released:
            return None
        event: Event = GenerationReleased(self._work.request_id, self.attempt, self._worker_id)
        if not self._released:
            event = replace(self._begun, from_tokens=tuple(choice.sent for choice in self._choices), rates=None)
        confirmed = await self._send(event)
        self._told_released = self._released
        return confirmed

    async def _send(self, event: Event) -> asyncio.Future[object]:
        if self._failure is not None:
            raise self._failure
        reply = self._work.reply
        try:
            future: asyncio.Future[object] = await self._producer.send(
                reply.topic,
                event,
                key=self._work.request_id,
                partition=reply.partition,
                headers=self._headers,
                encoding=reply.encoding,
                owner=self._work.tenant,
            )
        except (StoreAway, RecordTooLarge):
            raise  # nothing was written, and what is no larger than a record still can be
        except HeadraceError as error:
            self._failure = error
            raise
        self._in_flight.append(future)
        return future

    def _trim(self) -> None:
        """Forgets sends that the broker confirmed; raises what one failed with, and so does every later call."""
        while self._in_flight and self._in_flight[0].done():
            self._in_flight[0].result()
            self._in_flight.popleft()

    async def _settle(self, count: int) -> None:
        """Waits until at most so many sends are in flight."""
        while len(self._in_flight) > count:
            await asyncio.shield(self._in_flight[0])
            self._trim()
