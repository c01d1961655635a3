"""Many streams in one partition, long and interleaved, whose callers all come back at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiokafka import AIOKafkaProducer
from aiokafka.structs import RecordMetadata

from bridge.calls import Call, new_request_id
from bridge.event_ids import EventIds, Mark, Shape
from bridge.resume import Resumes, Wish
from bridge.streams import Dispatcher
from infra.kafka import make_producer
from infra.log import EventDecoder
from infra.payloads import Payloads
from infra.settings import BridgeSettings, KafkaSettings
from schemas.codec import encode
from schemas.events import (
    Attempt,
    ChoiceEnd,
    Event,
    GenerationStarted,
    InferenceCompleted,
    Reply,
    Timings,
    TokensGenerated,
    Usage,
)
from schemas.topics import TOKENS

OWN, PARTITION = 0, 3
TENANT, MODEL, VERSION = "herd", "m", "1"
ATTEMPT = Attempt(1, 1)
SECRET = b"herd-tests-secret-0123456789-0123456789"
IDS = EventIds(SECRET)
BATCH_BYTES = 256 * 1024
SHAPE = Shape(completions=False, include_usage=False, model=MODEL)


@dataclass
class Herd:
    """So many streams of so many tokens each; `first` is where the first token of each is in the partition."""

    streams: int
    tokens: int
    text: str = "x"
    encoding: Callable[[Event], bytes] = encode
    partition: int = PARTITION
    ids: list[str] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = [new_request_id() for _ in range(self.streams)]

    @property
    def rest(self) -> str:
        """What follows the first token of each."""
        return self.text * (self.tokens - 1)

    async def begin(self, producer: AIOKafkaProducer) -> None:
        """All start, and make one token."""
        for one in self.ids:
            where = (one, TENANT, MODEL, VERSION, "interactive")
            await self._send(producer, GenerationStarted(*where, ATTEMPT, (0,), 1, "w"))
        made = [await self._send(producer, self._token(one, 0)) for one in self.ids]
        self.first = {one: (await sent).offset for one, sent in zip(self.ids, made, strict=True)}

    async def go_on(self, producer: AIOKafkaProducer, gap_s: float = 0.0) -> None:
        """All make the rest of their tokens in turn, and end."""
        for i in range(1, self.tokens):
            for one in self.ids:
                await self._send(producer, self._token(one, i))
            await asyncio.sleep(gap_s)
        ends = (ChoiceEnd(0, self.tokens, "stop"),)
        for one in self.ids:
            where = (one, TENANT, MODEL, VERSION, "interactive")
            ended = InferenceCompleted(*where, ATTEMPT, ends, Usage(1, self.tokens), Timings(), "w")
            await self._send(producer, ended)
        await producer.flush()

    def _token(self, one: str, i: int) -> TokensGenerated:
        return TokensGenerated(one, 0, ATTEMPT, i, (i,), self.text)

    async def _send(self, producer: AIOKafkaProducer, event: Event) -> asyncio.Future[RecordMetadata]:
        sent: asyncio.Future[RecordMetadata] = await producer.send(
            TOKENS, self.encoding(event), partition=self.partition
        )
        return sent

    def wish(self, one: str) -> Wish:
        """To go on after the first token."""
        mark = Mark(
            request_id=one,
            reply=Reply(TOKENS, self.partition),
            offset=self.first[one],
            shape=SHAPE,
            version=VERSION,
            attempt=ATTEMPT,
            started=True,
            accepted=(1,),
            chars=(len(self.text),),
            text_offsets=(0,),
        )
        return Wish(one, IDS.write(mark, TENANT))


@asynccontextmanager
async def writing(kafka: KafkaSettings) -> AsyncIterator[AIOKafkaProducer]:
    """A producer that writes much at once."""
    async with make_producer(kafka, max_batch_size=BATCH_BYTES) as producer:
        yield producer


@asynccontextmanager
async def resuming(
    kafka: KafkaSettings, data_dir: Path, pending_bytes_max: int = 1024 * 1024, payloads: Payloads | None = None
) -> AsyncIterator[Resumes]:
    """What a front door resumes streams by, which itself follows another partition."""
    settings = BridgeSettings(kafka=kafka, data_dir=data_dir, reader_pending_bytes_max=pending_bytes_max)
    decoder = EventDecoder(kafka, payloads)
    own = Dispatcher(kafka, OWN, decoder)
    await own.start()
    resumes = Resumes(settings, own, decoder, IDS, lambda *_: None)
    try:
        yield resumes
    finally:
        await resumes.stop()
        await own.stop()


async def hear(call: Call) -> str:
    """All the text that comes. Raises what the call fails with."""
    text, done = "", False
    while not done:
        await call.wait()
        update = call.take()
        if update.error is not None:
            raise update.error
        text += "".join(delta.text for delta in update.deltas.values())
        done = update.done
    return text


async def come_back(resumes: Resumes, herd: Herd, one: str) -> str:
    """What one caller hears that comes back after the first token."""
    resumed = await resumes.open(TENANT, herd.wish(one), asyncio.get_running_loop().time())
    try:
        return await hear(resumed.call)
    finally:
        resumed.call.release()
