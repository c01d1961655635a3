"""One call's answer as it grows: records are folded in on one side, merged until the caller's connection takes them on the other.

A call has a leg for each prompt; each leg is one request in the log. Everything here runs in one event loop and never awaits but in
`wait` and `verdict`, which the connection's task calls, and in `room`, which is for whoever reads records that are old already.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from bridge.cached import told
from bridge.errors import rejection
from bridge.event_ids import Shape
from bridge.limits import least
from decisions.stream import COMPLETED, NEW, Closed, Input, StreamState, fold
from schemas.errors import HeadraceError
from schemas.events import (
    ChoiceEnd,
    GenerationStarted,
    InferenceCompleted,
    InferenceRejected,
    Rates,
    Reply,
    Tensor,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.ids import request_id
from schemas.reasons import Reason, lookup
from schemas.topics import INTERACTIVE

HEADERS_WAIT_S = 2.0
"""How long after generation started the HTTP status waits for a first token, so that an engine's error is a status too."""
LOGPROB_BYTES = 128
"""What one token's log-probability is taken to weigh while it waits."""


def new_request_id() -> str:
    """A request id of this moment."""
    return request_id(int(time.time() * 1000), os.urandom(10))


@dataclass(slots=True)
class Delta:
    """What is new of one choice since the caller last took: text, log-probabilities, tokens, and its end if it has come.

    `text_offset` counts the characters of all tokens before those of `logprobs`.
    """

    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    text_offset: int = 0
    tokens: int = 0
    end: ChoiceEnd | None = None


@dataclass(slots=True)
class Update:
    """What the caller hasn't had yet. `event_id` is that of the last record in it, None without one; `done` says it is the last."""

    deltas: dict[int, Delta]
    event_id: str | None
    done: bool
    error: HeadraceError | None

    @property
    def tokens(self) -> int:
        """New tokens over all choices."""
        return sum(delta.tokens for delta in self.deltas.values())


@dataclass(frozen=True, slots=True)
class Served:
    """What serves a request."""

    model: str
    version: str
    tier: str


@dataclass(slots=True, eq=False)
class Leg:
    """One request of a call, and where its choices stand among the call's.

    Attributes:
        partition, offset: where its last record is; none at or before it is folded again.
        chars, text_offsets: for each choice, the characters of its text, and those of all its tokens with log-probabilities.
        rates: what its tenant had left of its limits when it was let in.
        joined: it was asked before, and this is the id of the first, whose stream it reads.
        cached_ms: what its start told of the response cache, as `cached.told` reads it.
        outputs: of a tensor model, once it has ended.
    """

    call: Call
    request_id: str
    first_choice: int
    state: StreamState = NEW
    served: Served | None = None
    usage: Usage | None = None
    rates: Rates | None = None
    cached_ms: int | None = None
    partition: int = 0
    offset: int = -1
    chars: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    joined: bool = False
    outputs: tuple[Tensor, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the log says that it ended."""
        return self.state.closed is not None


@dataclass(slots=True, eq=False)
class Call:
    """What one caller waits for.

    Attributes:
        sending: its connection is in the middle of a write, so that what comes is merged.
        name: gives the id of the place where a leg stands; None if this call's events have no ids.
        shape: how the chunks look whose ids `name` gives.
        outlives: its requests go on when its caller leaves.
        keyed: its caller asks again under the same key if it hears nothing.
        resumed: it takes up what another call began.
        opened: its caller has had the opening of the stream.
        reply: where its records come if not to this bridge's own partition.
        tier: by which topic its requests go.
        tenant: who asked; "" if this bridge didn't put its requests into the log.
        on_release: frees what feeds it.
    """

    pending_bytes_max: int
    arrived_s: float
    legs: list[Leg] = field(default_factory=list)
    sending: bool = False
    name: Callable[[Leg], str] | None = None
    shape: Shape | None = None
    outlives: bool = False
    keyed: bool = False
    resumed: bool = False
    opened: bool = False
    reply: Reply | None = None
    tier: str = INTERACTIVE
    tenant: str = ""
    on_slow: Callable[[], None] | None = None
    on_release: Callable[[], None] | None = None
    error: HeadraceError | None = None
    timer: asyncio.TimerHandle | None = None
    _deltas: dict[int, Delta] = field(default_factory=dict)
    _shows: Leg | None = None
    _event_id: str | None = None
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _pending_bytes: int = 0
    _open_legs: int = 0
    _waiter: asyncio.Future[None] | None = None
    _started_s: float | None = None

    @property
    def request_id(self) -> str:
        """The first leg's request id, which names the call."""
        return self.legs[0].request_id

    @property
    def served(self) -> Served | None:
        """What serves it, once generation has started."""
        return next((leg.served for leg in self.legs if leg.served is not None), None)

    @property
    def usage(self) -> Usage:
        """What all legs used, once they have ended."""
        used = [leg.usage for leg in self.legs if leg.usage is not None]
        return Usage(
            sum(usage.prompt_tokens for usage in used),
            sum(usage.completion_tokens for usage in used),
            sum(usage.cached_tokens for usage in used),
        )

    @property
    def replayed(self) -> bool:
        """Whether it shows what was made for an earlier request with its key."""
        return any(leg.joined for leg in self.legs)

    @property
    def rates(self) -> Rates | None:
        """The least that any of its requests was told to be left; None if no limit holds. What a replay tells of it is old news."""
        return None if self.resumed else least(leg.rates for leg in self.legs)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or self._open_legs == 0

    def add_leg(self, request_id: str, first_choice: int) -> Leg:
        """Wait for one more request."""
        leg = Leg(self, request_id, first_choice)
        self.legs.append(leg)
        self._open_legs += 1
        return leg

    # --- from the log -------------------------------------------------------------------------------------------------

    def feed(self, leg: Leg, event: Input, partition: int, offset: int) -> None:
        """Fold a record into its leg; what counts is merged for the caller. A record that was fed before changes nothing."""
        if offset <= leg.offset:
            return
        leg.state, counted = fold(leg.state, event)
        closed = leg.state.closed
        if closed is None or closed.outcome == COMPLETED:  # a failure is read again by whoever goes on from here
            leg.partition, leg.offset = partition, offset
        if not counted or self.error is not None:
            return
        match event:
            case TokensGenerated():
                self._add_tokens(leg, event)
            case GenerationStarted():
                self._start(leg, event)
        if closed is not None:
            if closed.outcome == COMPLETED and isinstance(event, InferenceCompleted):
                self._complete(leg, event)
            else:
                self.fail(self._rejection(leg, event) if isinstance(event, InferenceRejected) else _failure(closed))
        self._wake()

    def begun(self) -> None:
        """Generation has started: the verdict waits for its first tokens a while longer and no more."""
        self._started_s = self._started_s or asyncio.get_running_loop().time()
        self._wake()

    def _rejection(self, leg: Leg, event: InferenceRejected) -> HeadraceError:
        return rejection(replace(event, rates=None) if self.resumed or leg.joined else event)

    def _start(self, leg: Leg, event: GenerationStarted) -> None:
        if not leg.joined:
            leg.rates = leg.rates or event.rates
            leg.cached_ms = told(event) if leg.cached_ms is None else leg.cached_ms
        leg.served = leg.served or Served(event.model, event.version, event.tier)
        if not leg.chars:
            leg.chars, leg.text_offsets = [0] * len(leg.state.accepted), [0] * len(leg.state.accepted)
        self.begun()

    def _delta(self, leg: Leg, choice: int) -> Delta:
        self._shows = leg
        index = leg.first_choice + choice
        delta = self._deltas.get(index)
        if delta is None:
            delta = self._deltas[index] = Delta(text_offset=leg.text_offsets[choice])
        return delta

    def _add_tokens(self, leg: Leg, event: TokensGenerated) -> None:
        delta = self._delta(leg, event.choice)
        delta.text += event.text
        delta.tokens += len(event.token_ids)
        leg.chars[event.choice] += len(event.text)
        had_bytes = self._pending_bytes
        self._pending_bytes += len(event.text.encode())
        if event.logprobs is not None:
            delta.logprobs = [] if delta.logprobs is None else delta.logprobs
            delta.logprobs.extend(event.logprobs)
            leg.text_offsets[event.choice] += sum(len(shown(item.text)) for item in event.logprobs)
            self._pending_bytes += LOGPROB_BYTES * sum(1 + len(item.top) for item in event.logprobs)
        added_bytes = self._pending_bytes - had_bytes
        if added_bytes > self.pending_bytes_max:
            added_bytes = 0  # larger than all that may wait: that is not its reader's fault
        if self.sending and had_bytes + added_bytes > self.pending_bytes_max:
            self.fail_slow()

    def _complete(self, leg: Leg, event: InferenceCompleted) -> None:
        for end in event.choices:
            delta = self._delta(leg, end.choice)
            delta.text += end.text
            delta.end = end
        leg.outputs = event.outputs
        self.complete(leg, event.usage)

    def complete(self, leg: Leg, usage: Usage) -> None:
        """The leg has ended well."""
        leg.usage = usage
        self._open_legs -= 1

    # --- from this side -----------------------------------------------------------------------------------------------

    def fail(self, error: HeadraceError) -> None:
        """End the call with an error, unless it ended already: its deadline, a closed socket, a log out of reach."""
        if not self.done:
            self._event_id = self._place()  # what is folded from now on isn't shown
            self.error = error
        self._wake()

    def release(self) -> None:
        """Nobody waits any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.on_release is not None:
            self.on_release()
        self.fail(HeadraceError(Reason.CANCELLED, Reason.CANCELLED.text))

    def fail_slow(self) -> None:
        """The caller doesn't read: what it hasn't taken is dropped, and its connection is told to end."""
        self._deltas.clear()
        self._shows, self._pending_bytes = None, 0
        self.fail(HeadraceError(Reason.SLOW_READER, Reason.SLOW_READER.text))
        if self.on_slow is not None:
            self.on_slow()

    # --- to the caller ------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether the caller has taken most of what is pending, or nothing more will come."""
        return self._pending_bytes <= self.pending_bytes_max // 2 or self.done

    async def room(self) -> None:
        """Wait until there is room."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    def _wake(self) -> None:
        if self.done:
            self._room.set()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is something to take; False if it took longer."""
        loop = asyncio.get_running_loop()
        end_s = None if timeout_s is None else loop.time() + timeout_s
        while not (self._deltas or self.done):
            if not await self._woken(end_s):
                return bool(self._deltas or self.done)
        return True

    async def _woken(self, end_s: float | None) -> bool:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(end_s):
                await self._waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None
        return True

    async def verdict(self) -> None:
        """Wait until the answer can begin: its first tokens, its end, or a while after its start. Raises what it failed with.

        Of a resumed or replayed one what came before the failure is shown first.
        """
        while not (self._deltas or self.done):
            end_s = None if self._started_s is None else self._started_s + HEADERS_WAIT_S
            if not await self._woken(end_s):
                break
        if self.error is not None and not ((self.resumed or self.replayed) and self._deltas):
            raise self.error

    def _place(self) -> str | None:
        """The id that stands for all that is pending."""
        return None if self._shows is None or self.name is None else self.name(self._shows)

    def take(self) -> Update:
        """Everything that is pending."""
        event_id = self._place() if self.error is None else self._event_id
        update = Update(self._deltas, event_id, self.done, self.error)
        self._deltas, self._shows, self._event_id, self._pending_bytes = {}, None, None, 0
        self._room.set()
        return update


def shown(token: bytes) -> str:
    """A token's bytes as text. A token may be part of a character."""
    return token.decode("utf-8", "replace")


def _failure(closed: Closed) -> HeadraceError:
    reason = lookup(closed.reason or "")
    return HeadraceError(reason, closed.message or reason.text)
