"""A caller comes back: its stream goes on after the last event it had, or starts from its beginning, on this bridge as on any other.

After an event, everything needed stands in its id: the records that follow are read from its partition until they are caught up with,
then handed on as they come. From the beginning, the place is looked up in `lifecycle`. What has gone from `tokens` comes from `answers`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from bridge.calls import Call, Leg, Served
from bridge.catching_up import CatchingUp
from bridge.errors import rejection, unreachable
from bridge.event_ids import PARAM, EventIds, Mark, Shape
from bridge.followers import Followers
from bridge.openai_chat import ChatRendering
from bridge.openai_completions import CompletionRendering
from bridge.readers import Gone, Readers
from bridge.rendering import Rendering
from bridge.replay import SKEW_MS, Asked, ReplyOf, answer, asked, offset_at, verdict
from bridge.streams import Dispatcher, OnJoined
from decisions.resume import rest
from infra.log import EventDecoder
from infra.settings import BridgeSettings
from schemas.errors import HeadraceError
from schemas.events import InferenceAdmitted, InferenceAnswered, InferenceJoined, InferenceRejected, Reply
from schemas.ids import unix_ms
from schemas.reasons import Reason
from schemas.topics import BATCH, HOUR_MS, INTERACTIVE

READERS_MAX = 16
"""Searches for a request in `lifecycle` and `answers` at once; others wait their turn. Whoever comes back with an event's id needs none."""
OPEN_MAX_S = 30.0
"""How long the caller waits for its turn and for its place to be found."""
LONGEST_MS = 2 * HOUR_MS
"""How long a request may take at most: endings forgets it then, and `tokens` its records."""
FOLLOW_MIN_S = 60.0
"""A resumed stream is followed at least so long."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller wants: a stream's rest after an event, or without one all of it, in the shape given here."""

    request_id: str
    last_event_id: str | None = None
    completions: bool = False
    include_usage: bool = False
    cancel_on_disconnect: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A request that goes on: its id, its tier, and where its stream is. `asked` is its own record, if that is all there is of it."""

    request_id: str
    tier: str
    reply: Reply
    asked: Asked | None = None


@dataclass(slots=True, eq=False)
class Resumed:
    """A stream taken up again."""

    call: Call
    shape: Shape

    def rendering(self) -> Rendering:
        """How it is shown; ask after the call's verdict, which tells the number of choices."""
        choices = len(self.call.legs[0].state.accepted)
        kind = CompletionRendering if self.shape.completions else ChatRendering
        return kind(self.call, self.shape, choices)


class Resumes:
    """Opens resumed streams, and names the events of all."""

    def __init__(
        self, settings: BridgeSettings, own: Dispatcher, decoder: EventDecoder, ids: EventIds, reply_of: ReplyOf
    ) -> None:
        """`own` reads this bridge's partition, `reply_of` the grant of a record."""
        self._settings = settings
        self._decoder = decoder
        self._ids = ids
        self._reply_of = reply_of
        self._followers = Followers(settings.kafka, own, decoder)
        self._readers = Readers(settings.kafka, READERS_MAX)
        self.catching_up = CatchingUp(settings.kafka, decoder)
        self._open: set[Call] = set()
        self._legs: set[Leg] = set()
        self.on_followed: Callable[[], None] = lambda: None

    def on_joined(self, hears: OnJoined) -> None:
        """Who hears that a request whose stream was taken up while it waited for its turn was asked before, and so has no stream of its own."""
        self._followers.on_joined = self.catching_up.on_joined = hears

    def __len__(self) -> int:
        """How many resumed streams are open."""
        return len(self._open)

    def followed(self) -> set[str]:
        """The requests whose streams are read again, and which haven't ended."""
        return {leg.request_id for leg in self._legs if not leg.ended}

    async def stop(self) -> None:
        """Stop reading for whoever is left."""
        for call in list(self._open):
            call.release()
        await self.catching_up.stop()
        await self._readers.stop()
        await self._followers.stop()

    def namer(self, shape: Shape, tenant: str, reply: Reply, answered: bool = False) -> Callable[[Leg], str]:
        """Gives the id of the place where a leg of a call with a single one stands."""

        def name(leg: Leg) -> str:
            mark = Mark(
                request_id=leg.request_id,
                reply=replace(reply, partition=leg.partition),
                offset=leg.offset,
                shape=shape,
                version="" if leg.served is None else leg.served.version,
                attempt=leg.state.attempt,
                started=leg.state.started,
                released=leg.state.released,
                accepted=leg.state.accepted,
                chars=tuple(leg.chars),
                text_offsets=tuple(leg.text_offsets) if shape.completions and any(leg.text_offsets) else (),
                usage=leg.usage,
                answered=answered,
            )
            return self._ids.write(mark, tenant)

        return name

    async def open(self, tenant: str, wish: Wish, arrived_s: float) -> Resumed:
        """Find the place and begin to read there; release the call whatever happens.

        Raises HeadraceError: invalid_request, not_found, overloaded, unavailable, and what the request was refused for.
        """
        mark = None if wish.last_event_id is None else self._ids.read(wish.last_event_id, tenant)
        if mark is not None and mark.request_id != wish.request_id:
            raise HeadraceError(Reason.INVALID_REQUEST, "the event is of another stream", param=PARAM)
        call = Call(self._settings.reader_pending_bytes_max, arrived_s, resumed=True, opened=mark is not None)
        call.outlives = not wish.cancel_on_disconnect
        leg = call.add_leg(wish.request_id, 0)
        frees = ExitStack()
        call.on_release = frees.close
        self._open.add(call)
        frees.callback(self._open.discard, call)
        try:
            async with asyncio.timeout(OPEN_MAX_S):
                return await self._begin(tenant, wish, leg, mark, frees)
        except (TimeoutError, KafkaError, OSError) as error:
            call.release()
            _log.warning("a stream can't be resumed", request_id=wish.request_id, error=repr(error))
            raise unreachable() from None
        except BaseException:
            call.release()
            raise

    async def _begin(self, tenant: str, wish: Wish, leg: Leg, mark: Mark | None, frees: ExitStack) -> Resumed:
        call = leg.call
        if mark is not None and mark.usage is not None:
            _restore(leg, mark, tenant)
            return Resumed(call, mark.shape)
        if mark is None:
            shape, place, offset = await self._from_start(tenant, wish, leg)
        else:
            shape, place, offset = mark.shape, place_of(mark.reply), mark.offset + 1
            await self._after(place, offset, tenant, leg, mark)
        if not call.done:
            await self.follow(place, offset, leg, frees)
            late = HeadraceError(Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED.text)
            wait_s = max(FOLLOW_MIN_S, _left_s(leg.request_id))
            call.timer = asyncio.get_running_loop().call_later(wait_s, call.fail, late)
        return Resumed(call, shape)

    async def _after(self, place: TopicPartition, offset: int, tenant: str, leg: Leg, mark: Mark) -> None:
        """Stand right after a mark."""
        _restore(leg, mark, tenant)
        leg.call.reply = mark.reply
        leg.call.name = self.namer(mark.shape, tenant, mark.reply)
        leg.call.begun()
        try:
            if mark.answered:
                raise Gone
            await self.catching_up.check(place, offset)
        except Gone:
            async with self._readers.lend() as consumer:
                found = await answer(consumer, self._decoder, leg.request_id, tenant)
            if found is None:
                raise HeadraceError(Reason.NOT_FOUND, "the rest of this stream is no longer kept") from None
            self._show(leg, found, mark.shape, mark.reply)

    async def place(self, tenant: str, request_id: str) -> Place | None:
        """Where a tenant's request is; None if it has ended for certain. Of a repeat, the place of the first.

        Raises HeadraceError: not_found, overloaded, unavailable.
        """
        try:
            async with asyncio.timeout(OPEN_MAX_S):
                found = await self._verdict(tenant, request_id)
        except (TimeoutError, KafkaError, OSError) as error:
            _log.warning("a request can't be looked up", request_id=request_id, error=repr(error))
            raise unreachable() from None
        if isinstance(found, InferenceRejected):
            return None
        if isinstance(found, InferenceJoined):
            first = Place(found.first_request_id, found.tier, found.first_reply)
            return first if _left_s(request_id) > 0 else None
        must_end_ms = found.deadline_ms + (LONGEST_MS if found.time_limit_ms is None else found.time_limit_ms)
        if _left_s(request_id) <= 0 and must_end_ms < time.time() * 1000:  # a batch line may have waited for long
            return None
        return Place(found.request_id, found.tier, found.reply)

    async def undecided(self, tenant: str, request_id: str, tiers: Iterable[str]) -> Place | None:
        """Where a tenant's request will be that admission hasn't decided: it waits for its turn, or isn't even read. None if none of these
        tiers was asked under the id. Raises HeadraceError: overloaded, unavailable.
        """
        try:
            async with asyncio.timeout(OPEN_MAX_S), self._readers.lend() as consumer:
                for tier in tiers:
                    found = await asked(consumer, self._decoder, request_id, tenant, tier, self._reply_of)
                    if found is not None:
                        return Place(request_id, tier, found.reply, found)
        except (TimeoutError, KafkaError, OSError) as error:
            _log.warning("a request can't be looked up", request_id=request_id, error=repr(error))
            raise unreachable() from None
        return None

    async def _verdict(self, tenant: str, request_id: str) -> InferenceAdmitted | InferenceJoined | InferenceRejected:
        async with self._readers.lend() as consumer:
            found = await verdict(consumer, self._decoder, request_id, tenant)
        if found is None:
            raise HeadraceError(Reason.NOT_FOUND, "there is no such stream")
        return found

    async def _verdict_or_record(
        self, tenant: str, request_id: str
    ) -> InferenceAdmitted | InferenceJoined | InferenceRejected | Asked:
        try:
            return await self._verdict(tenant, request_id)
        except HeadraceError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            waits = await self.undecided(tenant, request_id, (INTERACTIVE, BATCH))
            if waits is None or waits.asked is None:
                raise
            return waits.asked

    async def _from_start(self, tenant: str, wish: Wish, leg: Leg) -> tuple[Shape, TopicPartition, int]:
        """Stand at a request's beginning, which is returned: the shape, and the offset from which on its partition is read."""
        found = await self._verdict_or_record(tenant, wish.request_id)
        if isinstance(found, InferenceRejected):
            raise rejection(replace(found, rates=None))  # what was left then is old news
        if isinstance(found, InferenceJoined):
            leg.request_id, reply, asked_ms = found.first_request_id, found.first_reply, found.first_requested_ms
        elif isinstance(found, Asked):
            reply, asked_ms = found.reply, found.asked_ms
            leg.call.tier = found.tier  # of which its cancel has to hear
        else:
            reply, asked_ms = found.reply, found.requested_ms
        shape = Shape(wish.completions, wish.include_usage, found.model)
        leg.call.reply, leg.call.shape = reply, shape
        place, offset = await self.at_start(leg, tenant, reply, asked_ms, shape)
        return shape, place, offset

    async def at_start(
        self, leg: Leg, tenant: str, reply: Reply, asked_ms: int, shape: Shape | None
    ) -> tuple[TopicPartition, int]:
        """Stand at the beginning of a stream that was asked for then: its partition, and the offset from which on that is read.

        What `tokens` no longer holds whole is fed from its answer. Without a shape its events get no ids. Raises HeadraceError
        (not_found, unavailable), KafkaError.
        """
        if shape is not None:
            leg.call.name = self.namer(shape, tenant, reply)
        place = place_of(reply)
        async with self._readers.lend() as consumer:
            offset, whole = await offset_at(consumer, place, asked_ms - SKEW_MS)
            if not whole:
                found = await answer(consumer, self._decoder, leg.request_id, tenant)
                if found is not None:
                    self._show(leg, found, shape, reply)
                elif _left_s(leg.request_id) <= 0:
                    raise HeadraceError(Reason.NOT_FOUND, "this stream is no longer kept")
        return place, offset

    def _show(self, leg: Leg, found: InferenceAnswered, shape: Shape | None, reply: Reply) -> None:
        """Feed a leg the rest of a whole answer. Its offsets are nobody's: whoever comes back is answered from the answer again."""
        call = leg.call
        if shape is not None:
            call.name = self.namer(shape, found.tenant, reply, answered=True)
        for offset, event in enumerate(rest(found, leg.state, tuple(leg.chars)), leg.offset + 1):
            call.feed(leg, event, reply.partition, offset)

    async def follow(self, place: TopicPartition, offset: int, leg: Leg, frees: ExitStack) -> None:
        """Read on from an offset until `frees` is closed. Raises HeadraceError (overloaded), KafkaError."""
        self._legs.add(leg)
        frees.callback(self._legs.discard, leg)
        self.on_followed()
        follower = await self._followers.acquire(place)
        frees.callback(self._followers.release, follower)
        frees.callback(follower.unregister, leg)
        self.catching_up.join(leg, offset, follower)


def place_of(reply: Reply) -> TopicPartition:
    """The partition that a grant names."""
    return TopicPartition(reply.topic, reply.partition)


def _restore(leg: Leg, mark: Mark, tenant: str) -> None:
    leg.state = mark.state(tenant)
    leg.served = Served(mark.shape.model, mark.version, INTERACTIVE)
    leg.partition, leg.offset = mark.reply.partition, mark.offset
    leg.chars = list(mark.chars)
    leg.text_offsets = list(mark.text_offsets) or [0] * len(mark.accepted)
    if mark.usage is not None:
        leg.call.complete(leg, mark.usage)


def _left_s(request_id: str) -> float:
    return (unix_ms(request_id) + LONGEST_MS) / 1000 - time.time()
