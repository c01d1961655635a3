"""What the log holds of all requests since a mark: every admitted one must have exactly one ending, and the stream that it tells of."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiokafka import TopicPartition

from cli.records import Read, partitions_of, read
from decisions.stream import NEW, REJECTED, StreamState, fold
from infra.kafka import make_consumer
from infra.log import EventDecoder
from infra.settings import KafkaSettings
from schemas.events import (
    GenerationStarted,
    InferenceAdmitted,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    StreamEvent,
    TokensGenerated,
)
from tests.system.running import RunningStack

SETTLED_WAIT_S = 90.0
_STREAM: tuple[type[Any], ...] = (*StreamEvent.__args__, InferenceRejected)
_TOPICS = ("requests.", "tokens", "lifecycle")


@dataclass
class Story:
    """One request as the log tells it. `endings` are those on `lifecycle`, as (outcome, reason, tokens).

    `attempts` are all that its stream names, also those that a worker only took as a precaution; `runs` those that began.
    """

    asked: InferenceRequested | None = None
    admitted: InferenceAdmitted | None = None
    endings: list[tuple[str, str | None, int]] = field(default_factory=list)
    stream: StreamState = NEW
    text: str = ""
    attempts: set[tuple[int, int]] = field(default_factory=set)
    runs: set[tuple[int, int]] = field(default_factory=set)

    @property
    def stands(self) -> str:
        """How far it came."""
        if self.endings:
            return " ".join(filter(None, self.endings[0][:2]))
        if self.runs:
            return f"begun {len(self.runs)} times, {sum(self.stream.accepted)} tokens"
        if self.attempts:
            return "taken over"
        if self.admitted is not None:
            return "admitted"
        return "asked"

    @property
    def script(self) -> str:
        """What the scripted engine makes of the request when nobody disturbs it."""
        assert self.asked is not None and self.asked.messages is not None
        content = self.asked.messages[-1].content
        if not content.startswith("{"):
            return content
        given = json.loads(content)
        return "".join(given.get("tokens", ())) * int(given.get("repeat", 1))

    def tell(self, item: Read) -> None:
        """Takes one more record in, in the order of its partition."""
        event = item.event
        match event:
            case InferenceRequested():
                self.asked = event
            case InferenceAdmitted():
                self.admitted = event
            case InferenceCompleted() if item.topic == "lifecycle":
                self.endings.append(("completed", None, event.usage.completion_tokens))
            case InferenceFailed() if item.topic == "lifecycle":
                self.endings.append(("failed", event.reason, event.usage.completion_tokens if event.usage else 0))
        if item.topic.startswith("tokens") and isinstance(event, _STREAM):
            self.stream, counted = fold(self.stream, event)
            if (attempt := getattr(event, "attempt", None)) is not None:
                self.attempts.add((attempt.generation, attempt.counter))
                if isinstance(event, GenerationStarted):
                    self.runs.add((attempt.generation, attempt.counter))
            if counted and isinstance(event, TokensGenerated):
                self.text += event.text
            if counted and isinstance(event, InferenceCompleted):
                self.text += "".join(choice.text for choice in event.choices)


class Mark:
    """A place in the log: reads what came after it on the topics whose names begin so."""

    def __init__(self, stack: RunningStack, *topics: str) -> None:
        self._stack, self._topics = stack, topics
        self._read_to: dict[TopicPartition, int] = stack.thread.run(_ends(stack.kafka, topics))
        self._found: list[Read] = []

    def records(self) -> list[Read]:
        """Everything since, each partition in its order. What an earlier call read isn't read again: many wait for something by asking."""
        self._found += self._stack.thread.run(_records(self._stack.kafka, self._topics, self._read_to))
        return self._found.copy()


class Audit:
    """Judges what came into the log since it was made."""

    def __init__(self, stack: RunningStack) -> None:
        self._mark = Mark(stack, *_TOPICS)
        self._until = stack.until

    def stories(self) -> dict[str, Story]:
        """Every request heard of since, by its id."""
        found: dict[str, Story] = defaultdict(Story)
        for item in self._mark.records():
            if request_id := getattr(item.event, "request_id", None):
                found[request_id].tell(item)
        return dict(found)

    def standing(self) -> dict[str, int]:
        """How many requests stand where, for whoever reads why a test failed."""
        return dict(Counter(story.stands for story in self.stories().values()))

    def settled(self, *, scripted: bool = True) -> dict[str, Story]:
        """The admitted requests, once each has an ending: exactly one, the stream's own; a completed one has its script's text."""

        def look() -> dict[str, Story] | None:
            admitted = {name: story for name, story in self.stories().items() if story.admitted is not None}
            return admitted if all(story.endings for story in admitted.values()) else None

        found: dict[str, Story] = self._until(look, SETTLED_WAIT_S)
        for name, story in found.items():
            assert len(set(story.endings)) == 1, (name, story.endings)
            outcome, reason, tokens = story.endings[0]
            closed = story.stream.closed
            assert closed is not None, name
            # What one admission let in and another refused has the ending of a failure.
            assert ("failed" if closed.outcome == REJECTED else closed.outcome, closed.reason) == (outcome, reason), (
                name
            )
            assert sum(story.stream.accepted) == tokens, name
            if scripted and story.asked is not None and outcome == "completed":
                assert story.text == story.script, name
        return found


async def _ends(settings: KafkaSettings, topics: tuple[str, ...]) -> dict[TopicPartition, int]:
    consumer = make_consumer(settings)
    try:
        await consumer.start()
        names = [name for name in await consumer.topics() if name.startswith(topics)]
        ends: dict[TopicPartition, int] = await consumer.end_offsets(await partitions_of(consumer, names))
        return ends
    finally:
        await consumer.stop()


async def _records(settings: KafkaSettings, topics: tuple[str, ...], since: dict[TopicPartition, int]) -> list[Read]:
    """What came after `since`, which is moved on to where the next call starts."""
    ends = await _ends(settings, topics)
    left = {tp: end for tp, end in ends.items() if end > since.get(tp, 0)}
    if not left:
        return []
    consumer, decoder, found = make_consumer(settings), EventDecoder(settings), []
    try:
        await consumer.start()
        consumer.assign(list(left))
        for tp in left:
            consumer.seek(tp, since.get(tp, 0))
        while left:
            for tp, records in (await consumer.getmany(*left, timeout_ms=500)).items():
                found += [await read(record, decoder) for record in records if record.offset < ends[tp]]
            left = {tp: end for tp, end in left.items() if await consumer.position(tp) < end}
    finally:
        await consumer.stop()
    since.update(ends)
    return found
