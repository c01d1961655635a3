"""The open requests of one `tokens` partition, folded, and the ids of those that have closed.

Pure bookkeeping over `decisions.stream` and `decisions.endings`: records in, events out, and the offset below which
nothing is needed any more. It reads no clock and does no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from decisions import endings as rules
from decisions.accounts import ANY_TIER
from decisions.endings import CONTENT_BYTES_MAX, Ending, Facts
from decisions.stream import NEW, Input, StreamState, fold
from schemas.events import (
    GenerationStarted,
    GenerationTakenOver,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceStarted,
    Position,
    TokensGenerated,
)
from schemas.reasons import Reason

CLOSED_MAX = 500_000
"""Closed requests whose ids one partition remembers; of more, the oldest is forgotten."""

LetIn = GenerationStarted | GenerationTakenOver | InferenceFailed
Output = InferenceStarted | Ending | InferenceAnswered
Owner = tuple[str, str]
"""Tenant and tier: whose ledger has a request."""


@dataclass(slots=True)
class OpenRequest:
    """One request that has not closed. `counted` is None once its content is larger than an answer may be. `others` have let the same id in, too,
    as an event of each tells: theirs has no stream of its own.
    """

    first_offset: int
    first_ms: int
    state: StreamState = NEW
    known: Facts = field(default_factory=Facts)
    has_started: bool = False
    counted: list[TokensGenerated] | None = field(default_factory=list)
    content_bytes: int = 0
    others: dict[Owner, LetIn] = field(default_factory=dict)

    @property
    def owner(self) -> Owner:
        """Whose ledger has it."""
        return self.known.tenant, self.known.tier


@dataclass(slots=True)
class _Closed:
    """When a request closed, why (of one that was only forgotten: None), and who was told its ending; nobody yet of a refused one."""

    closed_ms: int
    reason: str | None = None
    told: set[Owner] = field(default_factory=set)


def _let_in_by(event: LetIn) -> Owner | None:
    """Whose request an event tells to have been let in: a worker has it, or its deadline has come, or its admission takes it back."""
    if isinstance(event, InferenceFailed) and not event.if_not_started:
        return None
    return event.tenant, event.tier


class FoldTable:
    """Folds one partition, from the offset `silent_below` on aloud: what closed before it has been told already."""

    def __init__(self, topic: str, partition: int, silent_below: int, remember_ms: int) -> None:
        self.topic = topic
        self.partition = partition
        self.open: OrderedDict[str, OpenRequest] = OrderedDict()
        self.content_bytes = 0
        self._silent_below = silent_below
        self._remember_ms = remember_ms
        self._closed: OrderedDict[str, _Closed] = OrderedDict()
        self._next = silent_below
        self._aloud = False

    @property
    def committable(self) -> int:
        """The offset below which no open request has a record."""
        oldest = next(iter(self.open.values()), None)
        return self._next if oldest is None else min(self._next, oldest.first_offset)

    def skip(self, offset: int) -> bool:
        """Pass over a record; whether it is heard for the first time."""
        self._next = max(self._next, offset + 1)
        return offset >= self._silent_below

    def apply(self, offset: int, timestamp_ms: int, event: Input) -> list[Output]:
        """Fold one event; what is to be written because of it."""
        self.skip(offset)
        self._forget(timestamp_ms)
        if offset >= self._silent_below and not self._aloud:
            self._aloud = True
            self.drop_beyond(0, timestamp_ms)  # what was open when `silent_below` was committed has no record before it
        request_id = event.request_id
        if not request_id:
            return []
        if (closed := self._closed.get(request_id)) is not None:
            return self._late(closed, event)
        request = self.open.get(request_id) or OpenRequest(offset, timestamp_ms)
        request.state, counts = fold(request.state, event)
        if isinstance(event, LetIn) and request_id in self.open:
            self._note_other(request, event)
        if not counts:
            return []  # a request of which nothing has counted isn't worth a place in the table
        self.open[request_id] = request
        request.known = rules.facts(request.known, event)
        outputs = self._outputs(request, event, offset)
        if request.state.closed is not None:
            outputs += self._end(request, timestamp_ms, event)
        return outputs if self._aloud else []

    def _note_other(self, request: OpenRequest, event: LetIn) -> None:
        """It has begun on another tier, too, or its deadline there has come."""
        owner = _let_in_by(event)
        if owner is not None and owner != request.owner:
            request.others.setdefault(owner, event)

    def _end(self, request: OpenRequest, timestamp_ms: int, event: Input) -> list[Output]:
        """A request has closed; the endings of others that let the same id in."""
        if isinstance(event, InferenceRejected):
            self._close(event.request_id, timestamp_ms, event.reason)
            return []
        self._close(event.request_id, timestamp_ms, Reason.CONFLICT.value, {request.owner, *request.others})
        return [rules.refused(other, Reason.CONFLICT.value) for other in request.others.values()]

    def _late(self, closed: _Closed, event: Input) -> list[Output]:
        """What comes for a stream that has closed by a refusal, or for another: somebody let the request in, too, and waits for its ending."""
        if closed.reason is None or not isinstance(event, LetIn):
            return []
        if closed.told and _let_in_by(event) is None:
            return []
        owner = event.tenant, event.tier
        if owner in closed.told or (event.tenant, ANY_TIER) in closed.told:
            return []
        closed.told.add(owner)
        return [rules.refused(event, closed.reason)] if self._aloud else []

    def _outputs(self, request: OpenRequest, event: Input, offset: int) -> list[Output]:
        match event:
            case TokensGenerated():
                self._gather(request, event)
                return []
            case GenerationStarted() if not request.has_started:
                request.has_started = True
                return [rules.started(event, Position(self.topic, self.partition, offset))]
            case InferenceCompleted() | InferenceFailed():
                answer = rules.answered(request.state, request.known, event, request.counted)
                return [rules.ending(request.state, request.known, event), answer]
            case InferenceRejected():
                return [rules.answered(request.state, request.known, event, request.counted)]
            case _:
                return []

    def _gather(self, request: OpenRequest, event: TokensGenerated) -> None:
        if request.counted is None:
            return
        size = rules.content_bytes(event)
        request.counted.append(event)
        request.content_bytes += size
        self.content_bytes += size
        if request.content_bytes > CONTENT_BYTES_MAX:
            self._drop_content(request)

    def _drop_content(self, request: OpenRequest) -> None:
        self.content_bytes -= request.content_bytes
        request.counted, request.content_bytes = None, 0

    def drop_contents(self, bytes_max: int) -> int:
        """Let go of whole answers, oldest first, until at most `bytes_max` are held; how many."""
        dropped = 0
        for request in self.open.values():
            if self.content_bytes <= bytes_max:
                break
            if request.content_bytes:
                self._drop_content(request)
                dropped += 1
        return dropped

    def drop_older_than(self, timestamp_ms: int) -> int:
        """Forget requests that opened before a time; how many. Their ends, if they come, are taken for strangers'."""
        dropped = 0
        while self.open and next(iter(self.open.values())).first_ms < timestamp_ms:
            self._close(next(iter(self.open)), timestamp_ms)
            dropped += 1
        return dropped

    def drop_beyond(self, requests_max: int, timestamp_ms: int) -> int:
        """Forget the oldest requests until at most `requests_max` are open; how many."""
        dropped = max(0, len(self.open) - requests_max)
        for _ in range(dropped):
            self._close(next(iter(self.open)), timestamp_ms)
        return dropped

    def _close(
        self, request_id: str, timestamp_ms: int, reason: str | None = None, told: set[Owner] | None = None
    ) -> None:
        self.content_bytes -= self.open.pop(request_id).content_bytes
        self._closed[request_id] = _Closed(timestamp_ms, reason, told or set())
        if len(self._closed) > CLOSED_MAX:
            self._closed.popitem(last=False)

    def _forget(self, now_ms: int) -> None:
        """Forget closed requests whose last zombie can't write any more; a few a call, so that none takes long."""
        for _ in range(2):
            oldest = next(iter(self._closed.items()), None)
            if oldest is None or now_ms - oldest[1].closed_ms < self._remember_ms:
                return
            del self._closed[oldest[0]]
