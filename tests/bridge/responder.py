"""Plays admission and a worker: answers each request on the reply partition of its grant, as the last message directs.

The last user message (or the prompt) may be a JSON object: `tokens` (texts of the tokens), `tail` (text held back to the end),
`reject` / `fail` (a reason), `fail_after` (tokens before the failure), `gap_ms` (between tokens), `first_ms` (before the start), `hang`
(never end), `unadmitted` (never begin), `turn_ms` (before admission decides), `joins` (the
id of the request that it is found to repeat then; with `only_there` `lifecycle` doesn't tell), `repeat`, `zombie` (send tokens of an old attempt too), `takeover_after` (tokens before another worker goes on), `rates` (what the
tenant has left: `requests` and `tokens`, each limit, remaining and reset_ms), `cache_key` and `cache_age_ms` (of the start). Anything else is echoed, one token a character.
A repeat under an idempotency key is told where the first's stream is.

A tensor request is answered by what `tests.bridge.tensors` computes of its inputs; one of the models of `tests.small_models` as that says, and
its first row may be such an object.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from decisions.idempotency import First, KeyIndex, KeyStanding, conflict, joined, keyed
from infra.grants import Grant, read
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer
from infra.payloads import Payloads
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import (
    Alternative,
    Attempt,
    ChoiceEnd,
    Event,
    GenerationStarted,
    GenerationTakenOver,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    Position,
    Rate,
    Rates,
    RequestKeyed,
    Timings,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.ids import unix_ms
from schemas.topics import BATCH, GRANT_HEADER, INTERACTIVE, LIFECYCLE, requests_topic
from tests.bridge.tensors import computed
from tests.small_models import is_small, rows_of, small_answer

VERSION = "v1"
ATTEMPT = Attempt(2, 1)
OLD = Attempt(1, 7)
NEXT = Attempt(3, 2)


@dataclass
class Seen:
    """A request as it stood in the log."""

    event: InferenceRequested
    grant: Grant
    headers: dict[str, bytes]
    key: bytes | None
    topic: str


@dataclass
class Responder:
    settings: KafkaSettings
    secret: bytes
    seen: dict[str, Seen] = field(default_factory=dict)
    cancelled: dict[str, Grant] = field(default_factory=dict)
    tokens_sent: dict[str, int] = field(default_factory=dict)
    keys: KeyIndex = field(default_factory=lambda: KeyIndex(INTERACTIVE))
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    payloads: Payloads | None = None

    async def run(self) -> None:
        """Answer until cancelled."""
        self._producer = EventProducer(self.settings, "responder", self.payloads)
        await self._producer.start()
        topics = requests_topic(INTERACTIVE), requests_topic(BATCH)
        consumer = make_consumer(self.settings, *topics, auto_offset_reset="latest")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._producer.stop)
            await consumer.start()
            stack.push_async_callback(consumer.stop)
            for partition in consumer.assignment():
                await consumer.seek_to_end(partition)
                await consumer.position(partition)
            self.ready.set()
            tasks: dict[str, asyncio.Task[None]] = {}
            stack.push_async_callback(_end, tasks)
            decoder = EventDecoder(self.settings, self.payloads)
            async for record in consumer:
                headers = dict(record.headers)
                try:
                    event = await decoder.decode(record.value)
                    grant = read(self.secret, headers.get(GRANT_HEADER, b""))
                except HeadraceError:  # another room's tests write here too, junk included
                    continue
                if isinstance(event, InferenceRequested):
                    self.seen[event.request_id] = Seen(event, grant, headers, record.key, record.topic)
                    if await self._asked_before(event, grant):
                        continue
                    tasks[event.request_id] = asyncio.create_task(self._answer_or_fail(event, grant))
                elif isinstance(event, InferenceCancelled):
                    self.cancelled[event.request_id] = grant
                    if event.request_id in tasks:
                        tasks[event.request_id].cancel()

    async def _send(self, grant: Grant, event: Event) -> None:
        await self._producer.send(grant.reply.topic, event, partition=grant.reply.partition, owner=grant.tenant)

    async def _admit(self, request: InferenceRequested, grant: Grant) -> None:
        position = Position(requests_topic(INTERACTIVE), 0, 0)
        now_ms = unix_ms(request.request_id)
        admitted = InferenceAdmitted(
            request.request_id, grant.tenant, grant.key_id, request.model, VERSION, INTERACTIVE, grant.reply, "work", 0, 7, 9, 16, now_ms, now_ms, position,
        )  # fmt: skip
        await self._producer.send(LIFECYCLE, admitted, key=grant.tenant)

    async def _asked_before(self, request: InferenceRequested, grant: Grant) -> bool:
        if (known := keyed(request, grant.reply)) is None:
            return False
        asked_ms = unix_ms(request.request_id)
        standing, first = self.keys.standing(grant.tenant, known, asked_ms)
        if first is None:
            who = request.request_id, grant.reply, request.model, asked_ms
            self.keys.hear(RequestKeyed(grant.tenant, INTERACTIVE, known, *who))
            return False
        place = Position(requests_topic(INTERACTIVE), 0, 0)
        event: Event = joined(request, grant.tenant, INTERACTIVE, first, asked_ms, place)
        if standing is KeyStanding.CONFLICT:
            text, param = conflict(request)
            names = request.request_id, grant.tenant, request.model, INTERACTIVE
            event = InferenceRejected(*names, "conflict", text, param=param)
        await self._send(grant, event)
        await self._producer.send(LIFECYCLE, event, key=grant.tenant)
        return True

    async def _join(self, request: InferenceRequested, grant: Grant, other: Seen, *, told: bool) -> None:
        asked = other.event
        first = First(asked.request_id, other.grant.reply, asked.model, unix_ms(asked.request_id), "")
        place = Position(requests_topic(INTERACTIVE), 0, 0)
        event = joined(request, grant.tenant, INTERACTIVE, first, unix_ms(request.request_id), place)
        await self._send(grant, event)
        if told:
            await self._producer.send(LIFECYCLE, event, key=grant.tenant)

    async def _answer_or_fail(self, request: InferenceRequested, grant: Grant) -> None:
        """Whatever breaks here is told: a call that is never answered waits for minutes."""
        try:
            await self._answer(request, grant)
        except Exception as error:
            where = (request.request_id, grant.tenant, request.model, VERSION, INTERACTIVE)
            text = f"the responder failed: {error!r}"
            failed = InferenceFailed(*where, "internal_error", text, ATTEMPT, (0,) * request.sampling.n)
            await self._send(grant, failed)

    async def _answer(self, request: InferenceRequested, grant: Grant) -> None:
        if request.inputs is not None and not is_small(request.model):
            await self._answer_tensors(request, grant)
            return
        script = _script(request)
        common = (request.request_id, grant.tenant, request.model)
        await asyncio.sleep(script.get("turn_ms", 0) / 1000)
        if "joins" in script:
            await self._join(request, grant, self.seen[script["joins"]], told=not script.get("only_there"))
            return
        if "reject" in script:
            event = InferenceRejected(
                *common,
                INTERACTIVE,
                script["reject"],
                "no",
                param=script.get("param"),
                retry_after_ms=script.get("retry_after_ms"),
                rates=_rates(script),
            )
            await self._send(grant, event)
            await self._producer.send(LIFECYCLE, event, key=grant.tenant)
            return
        if script.get("unadmitted"):
            await asyncio.sleep(3600)
        await self._admit(request, grant)
        await asyncio.sleep(script.get("first_ms", 0) / 1000)
        n = request.sampling.n
        where = (*common, VERSION, INTERACTIVE)
        attempt = ATTEMPT
        started = GenerationStarted(
            *where, attempt, (0,) * n, prompt_tokens=7, worker_id="w", rates=_rates(script),
            cache_key=script.get("cache_key", ""), cache_age_ms=script.get("cache_age_ms"),
        )  # fmt: skip
        await self._send(grant, started)
        if request.inputs is not None:
            outputs, prompt_tokens = small_answer(request)
            end, used = ChoiceEnd(0, 0, "stop"), Usage(prompt_tokens, 0)
            await self._send(grant, InferenceCompleted(*where, attempt, (end,), used, Timings(), "w", outputs))
            return
        tokens = [text.encode() for text in script["tokens"]] * script.get("repeat", 1)
        for i, token in enumerate(tokens):
            if script.get("takeover_after") == i:
                attempt = NEXT
                await self._send(grant, GenerationTakenOver(*where, attempt, "w2"))
                await asyncio.sleep(script.get("gap_ms", 0) / 1000)
                await self._send(grant, TokensGenerated(request.request_id, 0, ATTEMPT, i, (666,), "LATE"))
                await self._send(grant, GenerationStarted(*where, attempt, (i,) * n, prompt_tokens=7, worker_id="w2"))
            if script.get("fail_after") == i:
                await self._send(grant, InferenceFailed(*where, script["fail"], "broke", attempt, (i,) * n))
                return
            for choice in range(n):
                if script.get("zombie"):
                    await self._send(grant, TokensGenerated(request.request_id, choice, OLD, i, (666,), "ZOMBIE"))
                logprobs = _logprobs(token, request.sampling.logprobs)
                await self._send(
                    grant, TokensGenerated(request.request_id, choice, attempt, i, (i,), token.decode(), logprobs)
                )
            self.tokens_sent[request.request_id] = i + 1
            if gap_ms := script.get("gap_ms"):
                await asyncio.sleep(gap_ms / 1000)
        if script.get("hang"):
            await asyncio.sleep(3600)
        ends = tuple(ChoiceEnd(choice, len(tokens), "stop", text=script.get("tail", "")) for choice in range(n))
        usage = Usage(7, n * len(tokens), 3)
        await self._send(grant, InferenceCompleted(*where, attempt, ends, usage, Timings(), "w"))

    async def _answer_tensors(self, request: InferenceRequested, grant: Grant) -> None:
        where = (request.request_id, grant.tenant, request.model, VERSION, INTERACTIVE)
        await self._admit(request, grant)
        await self._send(grant, GenerationStarted(*where, ATTEMPT, (0,), prompt_tokens=0, worker_id="w"))
        try:
            outputs = await computed(request)
        except HeadraceError as error:
            await self._send(grant, InferenceFailed(*where, error.reason.value, error.message, ATTEMPT, (0,)))
            return
        ends = (ChoiceEnd(0, 0, "stop"),)
        completed = InferenceCompleted(*where, ATTEMPT, ends, Usage(0, 0), Timings(), "w", outputs)
        await self._send(grant, completed)


async def _end(tasks: dict[str, asyncio.Task[None]]) -> None:
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


def _script(request: InferenceRequested) -> dict[str, Any]:
    if request.inputs is not None:
        row = rows_of(request)[0]
        text = row.decode(errors="replace") if row.startswith(b"{") else ""
    elif request.messages is not None:
        text = request.messages[-1].content
    else:
        text = request.prompt or "".join(map(_character, request.prompt_token_ids or ()))
    return {"tokens": ["ok"], **found} if (found := _directions(text)) is not None else {"tokens": list(text)}


def _directions(text: str) -> dict[str, Any] | None:
    """The object that a text is, or None if it is none: callers may send anything."""
    if not text.startswith("{"):
        return None
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return found


def _character(token_id: int) -> str:
    """Of a token id; what is no character is one that stands for it."""
    return chr(token_id) if 0 <= token_id < 0xD800 else "\N{REPLACEMENT CHARACTER}"


def _rates(script: dict[str, Any]) -> Rates | None:
    told = {unit: Rate(*numbers) for unit, numbers in script.get("rates", {}).items()}
    return Rates(**told) if told else None


def _logprobs(token: bytes, count: int | None) -> tuple[TokenLogprob, ...] | None:
    if count is None:
        return None
    top = tuple(Alternative(i, b"\xf0\x9f" if i else token, -0.5 - i) for i in range(count))
    return (TokenLogprob(0, token, -0.5, top),)
