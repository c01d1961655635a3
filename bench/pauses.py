"""How long a caller waited in the middle of its answer, and where that time went.

A pause is the longest time between two events that brought text which the caller didn't have yet: what is told once more, after an
answer was asked for anew, brings none. The shares of a pause are read back from the log, by the broker's own stamps, in whole milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from decisions.stream import NEW, Input, fold
from infra.log import EventDecoder
from infra.read import Positions, read_to_end
from infra.settings import KafkaSettings
from schemas.events import GenerationStarted, GenerationTakenOver, TokensGenerated
from schemas.topics import TOKENS


@dataclass(slots=True)
class Heard:
    """What one caller has got of its answer. `grown_s` has the times at which it grew, `tries` how often it was asked for."""

    text: str = ""
    tries: int = 1
    grown_s: list[float] = field(default_factory=list)
    _told: str = ""

    def take(self, at_s: float, text: str) -> None:
        """More text came."""
        self._told += text
        if len(self._told) > len(self.text):
            self.text = self._told
            self.grown_s.append(at_s)

    def again(self) -> None:
        """The caller asks anew, and is told everything from the beginning."""
        self.tries += 1
        self._told = ""

    @property
    def pause_ms(self) -> float:
        """The longest time without new text, from the first on; 0 for an answer of one event."""
        return 1000 * max((later - earlier for earlier, later in itertools.pairwise(self.grown_s)), default=0.0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of a request's stream, and when the broker appended it, in ms since 1970."""

    at_ms: int
    event: Input


@dataclass(frozen=True, slots=True)
class Shares:
    """A pause's parts, in ms.

    Attributes:
        noticed: from the last token to the marker of the next owner: the group finds out, shares anew, and the work is read again.
        fenced: from the marker to the start of the next attempt: the stream is read up to the marker.
        began: from that start to its first token: the engine takes the prompt and what was said already.
    """

    noticed: float
    fenced: float
    began: float

    @property
    def total(self) -> float:
        """From token to token."""
        return self.noticed + self.fenced + self.began


def owner(entries: Iterable[Entry], before_ms: float) -> str | None:
    """Which worker had the request at that time; None if none had started it."""
    starts = [e.event.worker_id for e in entries if isinstance(e.event, GenerationStarted) and e.at_ms <= before_ms]
    return starts[-1] if starts else None


def shares(entries: Sequence[Entry]) -> Shares | None:
    """The parts of a stream's longest pause; None if no other worker took it over meanwhile.

    If one that took it over had to leave it before its first token, the next one's work counts as `fenced`.
    """
    state, counted = NEW, []
    for entry in entries:
        state, counts = fold(state, entry.event)
        if counts:
            counted.append(entry)
    places = [place for place, entry in enumerate(counted) if isinstance(entry.event, TokensGenerated)]
    gaps = [
        (counted[later].at_ms - counted[earlier].at_ms, earlier, later) for earlier, later in itertools.pairwise(places)
    ]
    if not gaps:
        return None
    _, earlier, later = max(gaps)
    between = counted[earlier + 1 : later]
    markers = [entry.at_ms for entry in between if isinstance(entry.event, GenerationTakenOver)]
    starts = [entry.at_ms for entry in between if isinstance(entry.event, GenerationStarted)]
    if not markers or not starts:
        return None
    return Shares(markers[0] - counted[earlier].at_ms, starts[-1] - markers[0], counted[later].at_ms - starts[-1])


class Streams:
    """Reads the token streams of a round: `skip` what is there before it, `read` after it."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Reads nothing yet."""
        self._settings = settings
        self._positions: Positions = {}
        self._decoder = EventDecoder(settings)

    async def skip(self) -> None:
        """Passes over what is there."""
        async for _ in read_to_end(self._settings, TOKENS, self._positions):
            pass

    async def read(self) -> dict[str, list[Entry]]:
        """What has come since, by request, in the order of the log. Raises HeadraceError if the log can't be read."""
        found: dict[str, list[Entry]] = {}
        async for record in read_to_end(self._settings, TOKENS, self._positions):
            event = await self._decoder.decode(record.value)
            if isinstance(event, Input):
                found.setdefault(event.request_id, []).append(Entry(record.timestamp, event))
        return found
