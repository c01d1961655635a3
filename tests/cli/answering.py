"""Plays admission, a worker and endings for a batch job: each request of a tenant is answered in `answers`, once, as its text says.

A text that is a JSON object may have `error` (a reason, each time), `once` (a reason, the first time that its content is asked). A request whose id was
asked before isn't answered again: that is what the log's admission does. `crowded` is a reason for which it fails among others in one request, `for_now` one
for which it fails as long as `trouble` is on. `hold()` keeps answers back until `release()`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from infra.grants import read
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import ChoiceAnswer, InferenceAnswered, InferenceRequested, Usage
from schemas.topics import ANSWERS, BATCH, GRANT_HEADER, requests_topic
from tests.small_models import rows_of, small_answer


@dataclass
class Answering:
    settings: KafkaSettings
    secret: bytes
    tenant: str
    asked: Counter[str] = field(default_factory=Counter)
    requests: dict[str, InferenceRequested] = field(default_factory=dict)
    computed: Counter[bytes] = field(default_factory=Counter)
    ready: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    answers_max: int | None = None
    trouble: bool = True
    _refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self.ready.wait(30)

    def close(self) -> None:
        self.stop.set()
        self._thread.join(30)

    def forget(self) -> None:
        """Begin to count anew, and answer everything."""
        self.answered = 0
        self.answers_max = None
        self.trouble = True
        for told in (self.asked, self.requests, self.computed, self._refused):
            told.clear()

    def hold_after(self, count: int) -> None:
        """Answer so many more, and then none until `release`."""
        self.answers_max = self.answered + count

    def release(self) -> None:
        self.answers_max = None

    async def _run(self) -> None:
        producer = EventProducer(self.settings, "answering")
        await producer.start()
        consumer = make_consumer(self.settings, requests_topic(BATCH), auto_offset_reset="latest")
        await consumer.start()
        for partition in consumer.assignment():
            await consumer.seek_to_end(partition)
            await consumer.position(partition)
        decoder = EventDecoder(self.settings)
        waiting: list[InferenceRequested] = []
        self.ready.set()
        while not self.stop.is_set():
            for records in (await consumer.getmany(timeout_ms=20)).values():
                for record in records:
                    request = await self._heard(decoder, record)
                    if request is not None:
                        waiting.append(request)
            while waiting and (self.answers_max is None or self.answered < self.answers_max):
                request = waiting.pop(0)
                self.answered += 1
                answer = self._answer(request)
                await producer.send(ANSWERS, answer, key=answer.request_id)
        await consumer.stop()
        await producer.stop()

    async def _heard(self, decoder: EventDecoder, record: Any) -> InferenceRequested | None:
        try:
            event = await decoder.decode(record.value)
            grant = read(self.secret, dict(record.headers).get(GRANT_HEADER, b""))
        except HeadraceError:
            return None
        if not isinstance(event, InferenceRequested) or grant.tenant != self.tenant:
            return None
        self.asked[event.request_id] += 1
        if event.request_id in self.requests:
            assert self.requests[event.request_id] == event, "another request under a known id"
            return None
        self.requests[event.request_id] = event
        return event

    def _answer(self, request: InferenceRequested) -> InferenceAnswered:
        names = (request.request_id, self.tenant, request.model, "v1", BATCH)
        rows = asked_rows(request)
        for row in rows:
            script = json.loads(row) if row.startswith(b"{") else {}
            reason = script.get("error")
            if len(rows) > 1:
                reason = script.get("crowded", reason)
            if self.trouble:
                reason = script.get("for_now", reason)
            if reason is None and "once" in script and row.decode() not in self._refused:
                self._refused.add(row.decode())
                reason = script["once"]
            if reason is not None:
                return InferenceAnswered(*names, (), Usage(0, 0), reason, f"{reason}, as asked")
        self.computed.update(rows)
        if request.inputs is not None:
            outputs, tokens = small_answer(request)
            return InferenceAnswered(*names, (ChoiceAnswer(0, (), "", "stop"),), Usage(tokens, 0), outputs=outputs)
        choices = tuple(
            ChoiceAnswer(index, (1, 2), f"{rows[0].decode()}!", "stop") for index in range(request.sampling.n)
        )
        return InferenceAnswered(*names, choices, Usage(5, 2 * len(choices)))


def asked_rows(request: InferenceRequested) -> list[bytes]:
    if request.inputs is not None:
        return rows_of(request)
    if request.messages is not None:
        return [request.messages[-1].content.encode()]
    return [(request.prompt or str(request.prompt_token_ids)).encode()]
