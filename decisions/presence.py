"""Which front doors are there, and which open requests nobody watches any more: those yield their slots to their tenant's next.

A front door says five times a second that it is there, as long as it has calls open. Its request is orphaned when neither it nor a door at which the
caller has come back has been heard for `SILENT_MS`, by the log's own time, while others were: what is silent together with everybody else
is no sign, for then the log was away. So nothing depends on when this is read, and a reader that was stopped takes nobody for gone
who isn't. A door that was never heard isn't gone.

`Presence` is the bookkeeping: records in, in the order of the log. It reads no clock and does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from decisions.ledger_rows import Open
from schemas.events import FrontDoorSeen
from schemas.topics import HOUR_MS, MINUTE_MS

SILENT_MS = 1_000
"""Who was unheard for longer, while others were heard, is gone."""
FORGOTTEN_MS = 2 * HOUR_MS
"""A request runs no longer: nobody asks for a door after that."""
GAP_MS = 700
"""A longer time without a word from anybody tells nothing: whoever was heard before is judged anew from its end on."""
DOOR_CHARS_MAX = 16
"""A door's name is no longer, so that a ledger's rows keep their size; a longer one is a direct producer's invention, and ignored."""


class Presence:
    """Fold of the topic `doors`."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        self._adopted: dict[str, int] = {}
        self._now_ms = 0
        self._since_ms = 0
        self._swept_ms = 0

    @property
    def now_ms(self) -> int:
        """The time of the newest record. It doesn't go back, whatever the brokers' clocks do."""
        return self._now_ms

    def heard(self, event: FrontDoorSeen, told_ms: int) -> None:
        """A door is there, by its record's own time."""
        now_ms = max(self._now_ms, told_ms)
        if now_ms - self._now_ms > GAP_MS:
            self._since_ms = now_ms
        self._now_ms = self._heard[event.door] = now_ms
        self._adopted.update(dict.fromkeys(event.adopted, now_ms))
        if now_ms - self._swept_ms > MINUTE_MS:
            self._swept_ms = now_ms
            self._heard = {door: at_ms for door, at_ms in self._heard.items() if now_ms - at_ms <= FORGOTTEN_MS}
            self._adopted = {name: at_ms for name, at_ms in self._adopted.items() if now_ms - at_ms <= MINUTE_MS}

    def watched_ms(self, door: str, request_id: str) -> int | None:
        """When a door's request was watched last; None if the door was never heard."""
        heard_ms = self._heard.get(door)
        return None if heard_ms is None else max(heard_ms, self._adopted.get(request_id, 0))

    def orphaned(self, door: str, request_id: str) -> bool:
        """Whether nobody watches a door's request any more."""
        at_ms = self.watched_ms(door, request_id)
        return at_ms is not None and self._now_ms - max(at_ms, self._since_ms) > SILENT_MS


@dataclass(frozen=True, slots=True)
class Yielding:
    """Which requests yield their slots, the oldest first; `unsure`: some may, if their doors aren't heard soon."""

    orphans: tuple[str, ...] = ()
    unsure: bool = False


def yielding(
    opened: Mapping[str, Open],
    needed: Mapping[str, int],
    presence: Presence,
    asked_ms: int,
    door: str = "",
    ending: Collection[str] = (),
) -> Yielding:
    """Who makes room for a request of the same tenant, written at `asked_ms` by `door`, which needs so many slots in these scopes.

    All that is needed, or nothing; those that are `ending` already count for others. Only what is known up to the request itself counts.
    """
    orphans, unsure = {}, {}
    for request_id, one in opened.items():
        if not (one.door and one.hold.cost.running) or one.door == door or request_id in ending:
            continue
        at_ms = presence.watched_ms(one.door, request_id)
        if presence.orphaned(one.door, request_id):
            orphans[request_id] = one
        elif at_ms is not None and at_ms < asked_ms:
            unsure[request_id] = one
    if presence.now_ms >= asked_ms and (found := _enough(orphans, needed)):
        return Yielding(found)
    return Yielding(unsure=bool(_enough(orphans | unsure, needed)))


def _enough(opened: Mapping[str, Open], needed: Mapping[str, int]) -> tuple[str, ...]:
    """As few of these as make room, the oldest first; none if all of them don't."""
    left = dict(needed)

    def helps(one: Open) -> int:
        return sum(left[scope] > 0 for scope in one.hold.scopes if scope in left)

    found = []
    for request_id, one in sorted(opened.items(), key=lambda item: (-helps(item[1]), item[1].hold.charged_ms)):
        if helps(one):
            found.append(request_id)
            for scope in one.hold.scopes:
                if scope in left:
                    left[scope] -= 1
    return tuple(found) if found and max(left.values()) <= 0 else ()
