"""What is remembered of the verdicts and endings that one partition of `lifecycle` told, and by it what a record that asks is to what was decided before.

A record that asks may come again, a former owner of the partition may tell again what it decided, and an ending may be told before its
admission. Nothing here counts: what is reserved and spent is in `decisions.accounts`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum

from schemas.events import InferenceAdmitted, InferenceRejected, Position, Reply
from schemas.quick import quick

RECALLED_RECORDS = 10_000
"""Of so many records of the partition it is remembered what they told: a former owner may tell it again, and an ending may be told before its
admission. A newcomer reads them all, so there are not more."""
TOLD_MAX = 300_000
"""Decisions of one partition that are kept because their records may come again; of more, the oldest is forgotten. No more can come again:
so many are more than are read beyond the oldest that isn't done, with those that were parked."""

Key = tuple[str, str]
"""Tenant and request id."""
Verdict = InferenceAdmitted | InferenceRejected


class Standing(StrEnum):
    """What a record that asks is to what was decided before."""

    NEW = "new"
    """Nothing is known of it: decide."""
    REDELIVERED = "redelivered"
    """This very record was decided before a crash: do the same again."""
    REPEATED = "repeated"
    """Another record with this id was decided: that one's stream is its answer."""
    ENDED = "ended"
    """Its stream has ended, by its own work or before it was decided (a cancel was faster): nothing is to be done."""


@quick
@dataclass(frozen=True, slots=True)
class _Told:
    """A verdict, the offset of its record, the record that it was about, and whether its ending is told, too."""

    verdict: Verdict
    offset: int
    source: Position
    ended: bool = False


@quick
@dataclass(frozen=True, slots=True)
class Stray:
    """An ending that was told before its admission: the offset of its record, and what was used; None: it was refused after all."""

    offset: int
    used: int | None


class Recalled:
    """One partition's. The offsets given are those of its records, in their order."""

    def __init__(self) -> None:
        """Nothing was told."""
        self._told: OrderedDict[Key, _Told] = OrderedDict()
        self._strays: OrderedDict[Key, Stray] = OrderedDict()

    # --- what is told ------------------------------------------------------------------------------------------------

    def read(self, next_offset: int) -> None:
        """The partition is read up to there: an ending far behind has no admission any more."""
        while self._strays and next(iter(self._strays.values())).offset < next_offset - RECALLED_RECORDS:
            self._strays.popitem(last=False)

    def admitted(self, offset: int, event: InferenceAdmitted) -> tuple[bool, Stray | None]:
        """Whether an admission counts, as far as what was told of its id before says; and its ending, if that was told already."""
        key = event.tenant, event.request_id
        told, stray = self._told.get(key), self._strays.get(key)
        ended = told is not None and told.ended
        if counts := told is None or isinstance(told.verdict, InferenceRejected) or _later(event.source, told.source):
            self._note(key, _Told(event, offset, event.source, ended or stray is not None))
        return counts and not ended, stray

    def rejected(self, offset: int, event: InferenceRejected, source: Position) -> None:
        """A refusal of the record at `source`, whose id isn't open."""
        key = event.tenant, event.request_id
        told = self._told.get(key)
        if told is None or (isinstance(told.verdict, InferenceRejected) and _later(source, told.source)):
            self._note(key, _Told(event, offset, source))

    def ended(self, key: Key, offset: int, used: int | None, *, was_open: bool) -> None:
        """An ending, with what was used; None if it was refused after all. If nothing else is known of its id, it is a stray."""
        told = self._told.get(key)
        if told is not None and isinstance(told.verdict, InferenceAdmitted):
            self._told[key] = replace(told, ended=True)
        elif not was_open:
            self._strays.setdefault(key, Stray(offset, used))

    def _note(self, key: Key, told: _Told) -> None:
        """A verdict whose record may be delivered again."""
        self._told.pop(key, None)
        self._told[key] = told
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)

    # --- what is asked -----------------------------------------------------------------------------------------------

    def standing(self, key: Key, source_offset: int, *, is_open: bool) -> tuple[Standing, Verdict | None]:
        """What to do with a request at this offset of its own partition, and what was decided of its id. `is_open`: its id is, as is told."""
        told = self._told.get(key)
        if told is not None:
            same = told.source.offset == source_offset
            if same and told.ended:
                return Standing.ENDED, told.verdict
            # Of two refused with one id, the earlier was decided before.
            earlier = isinstance(told.verdict, InferenceRejected) and source_offset < told.source.offset
            return Standing.REDELIVERED if same or earlier else Standing.REPEATED, told.verdict
        if is_open:
            return Standing.REPEATED, None
        return (Standing.ENDED if key in self._strays else Standing.NEW), None

    def reply_of(self, key: Key) -> Reply | None:
        """Where the stream of an admitted request is, if its admission is remembered."""
        told = self._told.get(key)
        return told.verdict.reply if told is not None and isinstance(told.verdict, InferenceAdmitted) else None

    # --- what is forgotten -------------------------------------------------------------------------------------------

    def forget(self, next_offset: int, partition: int | None, committed: int) -> None:
        """What can't come again: its record, of requests, is committed, or another partition's, and what was told of it is long past."""
        gone = []
        for key, told in self._told.items():
            if told.offset >= next_offset - RECALLED_RECORDS:
                break  # as all that follow: they are in the order of their offsets
            if partition not in (None, told.source.partition) or told.source.offset < committed:
                gone.append(key)
        for key in gone:
            del self._told[key]

    def needed(self) -> list[int]:
        """From the least of these offsets a newcomer has to read, to know as much."""
        first = next(iter(self._told.values()), None)  # they are in the order of their offsets
        return [*([] if first is None else [first.offset]), *(stray.offset for stray in self._strays.values())]


def _later(source: Position, known: Position) -> bool:
    """Whether a record that asks comes after another with its id, as far as that can be told."""
    return (source.topic, source.partition) != (known.topic, known.partition) or source.offset > known.offset
