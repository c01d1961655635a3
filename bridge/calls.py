"""One call's answer as it grows: records are folded in on one side, merged until the caller's connection takes them on the other.

A call has a leg for each prompt; each leg is one request in the log. Everything here runs in one event loop and never awaits but in
`wait` and `verdict`, which the connection's task calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bridge.errors import rejection
from decisions.stream import COMPLETED, NEW, Closed, Input, StreamState, fold
from schemas.errors import HeadraceError
from schemas.events import (
    ChoiceEnd,
    GenerationStarted,
    InferenceCompleted,
    InferenceRejected,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from schemas.reasons import Reason, lookup

HEADERS_WAIT_S = 2.0
"""How long after generation started the HTTP status waits for a first token, so that an engine's error is a status too."""
LOGPROB_BYTES = 128
"""What one token's log-probability is taken to weigh while it waits."""


@dataclass(slots=True)
class Delta:
    """What is new of one choice since the caller last took: text, log-probabilities, tokens, and its end if it has come."""

    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    tokens: int = 0
    end: ChoiceEnd | None = None


@dataclass(slots=True)
class Update:
    """What the caller hasn't had yet. `event_id` is that of the last record in it, None without one; `done` says it is the last."""

    deltas: dict[int, Delta]
    event_id: str | None
    done: bool
    error: HeadraceError | None
    error_id: str | None

    @property
    def tokens(self) -> int:
        """New tokens over all choices."""
        return sum(delta.tokens for delta in self.deltas.values())


@dataclass(slots=True)
class Leg:
    """One request of a call, and where its choices stand among the call's."""

    call: Call
    request_id: str
    first_choice: int
    state: StreamState = NEW
    started: GenerationStarted | None = None
    usage: Usage | None = None

    @property
    def ended(self) -> bool:
        """Whether the log says that it ended."""
        return self.state.closed is not None


@dataclass(slots=True, eq=False)
class Call:
    """What one caller waits for. `sending` says that its connection is in the middle of a write, so that what comes is merged."""

    pending_bytes_max: int
    arrived_s: float
    legs: list[Leg] = field(default_factory=list)
    sending: bool = False
    on_slow: Callable[[], None] | None = None
    error: HeadraceError | None = None
    timer: asyncio.TimerHandle | None = None
    _error_id: str | None = None
    _deltas: dict[int, Delta] = field(default_factory=dict)
    _event_id: str | None = None
    _pending_bytes: int = 0
    _open_legs: int = 0
    _waiter: asyncio.Future[None] | None = None
    _started_s: float | None = None

    @property
    def request_id(self) -> str:
        """The first leg's request id, which names the call."""
        return self.legs[0].request_id

    @property
    def started(self) -> GenerationStarted | None:
        """The first start of generation that counted, if there was one."""
        return next((leg.started for leg in self.legs if leg.started is not None), None)

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
        """Fold a record into its leg; what counts is merged for the caller."""
        leg.state, counted = fold(leg.state, event)
        if not counted or self.error is not None:
            return
        match event:
            case TokensGenerated():
                self._add_tokens(leg, event)
            case GenerationStarted():
                leg.started = leg.started or event
                self._started_s = self._started_s or asyncio.get_running_loop().time()
                self._wake()
                return
        closed = leg.state.closed
        if closed is None and not isinstance(event, TokensGenerated):
            return
        event_id = f"{self.request_id}:{partition}:{offset}"
        if closed is None:
            self._event_id = event_id
        elif closed.outcome == COMPLETED and isinstance(event, InferenceCompleted):
            self._complete(leg, event)
            self._event_id = event_id
        else:
            self._error_id = event_id
            self.fail(rejection(event) if isinstance(event, InferenceRejected) else _failure(closed))
        self._wake()

    def _delta(self, choice: int) -> Delta:
        delta = self._deltas.get(choice)
        if delta is None:
            delta = self._deltas[choice] = Delta()
        return delta

    def _add_tokens(self, leg: Leg, event: TokensGenerated) -> None:
        delta = self._delta(leg.first_choice + event.choice)
        delta.text += event.text
        delta.tokens += len(event.token_ids)
        self._pending_bytes += len(event.text.encode())
        if event.logprobs is not None:
            delta.logprobs = [] if delta.logprobs is None else delta.logprobs
            delta.logprobs.extend(event.logprobs)
            self._pending_bytes += LOGPROB_BYTES * sum(1 + len(item.top) for item in event.logprobs)
        if self.sending and self._pending_bytes > self.pending_bytes_max:
            self.fail_slow()

    def _complete(self, leg: Leg, event: InferenceCompleted) -> None:
        for end in event.choices:
            delta = self._delta(leg.first_choice + end.choice)
            delta.text += end.text
            delta.end = end
        leg.usage = event.usage
        self._open_legs -= 1

    # --- from this side -----------------------------------------------------------------------------------------------

    def fail(self, error: HeadraceError) -> None:
        """End the call with an error, unless it ended already: its deadline, a closed socket, a log out of reach."""
        if not self.done:
            self.error = error
        self._wake()

    def release(self) -> None:
        """Nobody waits any more."""
        if self.timer is not None:
            self.timer.cancel()
        self.fail(HeadraceError(Reason.CANCELLED, Reason.CANCELLED.text))

    def fail_slow(self) -> None:
        """The caller doesn't read: what it hasn't taken is dropped, and its connection is told to end."""
        self._deltas.clear()
        self._pending_bytes = 0
        self.fail(HeadraceError(Reason.SLOW_READER, Reason.SLOW_READER.text))
        if self.on_slow is not None:
            self.on_slow()

    # --- to the caller ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
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
        """Wait until the answer can begin: its first tokens, its end, or a while after its start. Raises what it failed with."""
        while not (self._deltas or self.done):
            end_s = None if self._started_s is None else self._started_s + HEADERS_WAIT_S
            if not await self._woken(end_s):
                break
        if self.error is not None:
            raise self.error

    def take(self) -> Update:
        """Everything that is pending."""
        update = Update(self._deltas, self._event_id, self.done, self.error, self._error_id)
        self._deltas, self._event_id, self._pending_bytes = {}, None, 0
        return update


def _failure(closed: Closed) -> HeadraceError:
    reason = lookup(closed.reason or "")
    return HeadraceError(reason, closed.message or reason.text)
