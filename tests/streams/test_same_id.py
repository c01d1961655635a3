"""One id in two records: every order in which verdicts, streams and endings can be told leaves nothing held in the ledgers.

`ways` makes the orders: what admissions (an owner and a former one, which is late) say of the two records, what workers and the clock write to
the one stream of the id, and what `endings` makes of it, each at any moment at which it can come. What `lifecycle` has in the end goes through
the fold of the ledgers, as its readers know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from decisions.accounts import Accounts, cost
from decisions.deadlines import Watch
from decisions.ledger import NEW, hold
from decisions.quota import Reserved
from schemas.events import (
    Attempt,
    ChoiceEnd,
    GenerationStarted,
    InferenceAdmitted,
    InferenceAnswered,
    InferenceCompleted,
    InferenceFailed,
    InferenceStarted,
    Position,
    Timings,
    Usage,
)
from schemas.topics import BATCH, INTERACTIVE, TOKENS, requests_topic
from streams.fold_table import FoldTable
from tests.decisions.ledger_site import event_of
from tests.decisions.ledgers import Asked, admitted, rejected
from tests.decisions.worlds import NOW

ID, TENANT = "r", "acme"
ASKED = Asked(NOW, ID, 10, "k1")
Word = tuple[str, int, str]
"""What is said, of which record, and of which tier that is."""
A0, A1, R0, R1 = (
    (kind, number, INTERACTIVE) for kind, number in (("admitted", 0), ("admitted", 1), ("rejected", 0), ("rejected", 1))
)
B1, S1 = ("admitted", 1, BATCH), ("rejected", 1, BATCH)
Log = tuple[Any, ...]


def event(word: Word) -> Any:
    """The record of a word."""
    kind, number, tier = word
    where = (ID, TENANT, "m", "v1", tier)
    source = Position(requests_topic(tier), 0, number)
    match kind:
        case "admitted":
            return admitted(ASKED, tier=tier, source=source, time_limit_ms=60_000)
        case "rejected":
            return rejected(ASKED, tier=tier, source=source)
        case "started":
            return GenerationStarted(*where, Attempt(1, number + 1), (0,), 1, "w")
        case _:
            ends = (ChoiceEnd(0, 0, "stop"),)
            return InferenceCompleted(*where, Attempt(1, number + 1), ends, Usage(1, 0), Timings(), "w")


@cache
def outputs(stream: tuple[Word, ...]) -> Log:
    """What `endings` makes of these words in `tokens`, in `lifecycle`."""
    table = FoldTable(TOKENS, 0, 0, 10**12)
    found = [output for offset, word in enumerate(stream) for output in table.apply(offset, NOW, event(word))]
    return tuple(output for output in found if not isinstance(output, InferenceAnswered))


def ways(verdicts: tuple[Word, ...], *, told_first: bool) -> Iterator[Log]:
    """Every `lifecycle` that can come of these verdicts. `told_first`: work is sent once its admission is told."""
    words = [verdict for verdict in verdicts if verdict[0] == "rejected"]
    for _, number, tier in (verdict for verdict in verdicts if verdict[0] == "admitted"):
        words += [("started", number, tier), ("ended", number, tier)]
    seen: set[tuple[tuple[Word, ...], tuple[Word, ...]]] = set()
    found: set[tuple[Any, ...]] = set()

    def comes(word: Word, life: tuple[Word, ...], stream: tuple[Word, ...]) -> bool:
        kind, *which = word
        if kind == "ended":
            return ("started", *which) in stream
        return kind == "rejected" or not told_first or ("admitted", *which) in life

    def go(life: tuple[Word, ...], stream: tuple[Word, ...]) -> None:
        if (life, stream) in seen:
            return
        seen.add((life, stream))
        heard = sum(word[0] == "output" for word in life)
        nexts = [((*life, verdict), stream) for verdict in verdicts if verdict not in life]
        nexts += [(life, (*stream, word)) for word in words if word not in stream and comes(word, life, stream)]
        if heard < len(outputs(stream)):
            nexts.append(((*life, ("output", heard, "")), stream))
        for following in nexts:
            go(*following)
        if not nexts:
            found.add(tuple(outputs(stream)[word[1]] if word[0] == "output" else event(word) for word in life))

    go((), ())
    yield from found


def readers(life: Log, tier: str = INTERACTIVE) -> Iterator[Accounts]:
    """Who has read all of it for a tier: an outsider, whoever let one of the records in, and newcomers that begin with the rows of any moment."""
    outsider = Accounts(tier)
    yield follow(outsider, life)
    for verdict in life:
        if isinstance(verdict, InferenceAdmitted) and verdict.tier == tier:
            owner = Accounts(tier)
            owner.take(Reserved(*hold({}, verdict.scopes, cost(verdict), NOW)), verdict)
            yield follow(owner, life)
    for count in range(1, len(life)):
        before, newcomer = follow(Accounts(tier), life[:count]), Accounts(tier)
        for row in before.save(0, NOW, last=True):
            newcomer.restore(event_of(row))
        yield follow(newcomer, life, newcomer.start)


def stopped(life: Log) -> bool:
    """Whether workers are told to stop."""
    watch = Watch(0)
    for offset, told in enumerate(life):
        watch.apply(offset, NOW, told)
    return watch.stops(NOW, 9) != []


def follow(accounts: Accounts, life: Log, start: int = 0) -> Accounts:
    for offset in range(start, len(life)):
        accounts.apply(offset, NOW, life[offset])
    return accounts


VERDICTS = [
    (verdicts, told_first)
    for count in (1, 2, 3, 4)
    for verdicts in combinations((A0, A1, R0, R1), count)
    for told_first in (True, False)
    if {A0, A1} & {*verdicts} and (told_first or count < 4)  # the last takes as long as all others
]


@pytest.mark.parametrize(("verdicts", "told_first"), VERDICTS, ids=str)
def test_whatever_comes_first_nothing_is_held_in_the_end(verdicts: tuple[Word, ...], told_first: bool) -> None:
    for life in ways(verdicts, told_first=told_first):
        for accounts in readers(life):
            counter = accounts.counters(TENANT).get("", NEW)
            assert (counter.running, counter.held, accounts.queues.total("m v1")) == (0, 0, 0), life


@pytest.mark.parametrize("told_first", [True, False])
@pytest.mark.parametrize("verdicts", [(A0, B1), (A0, B1, R0), (A0, B1, S1), (R0, B1)], ids=str)
def test_nor_is_it_where_one_of_the_records_is_of_another_tier(verdicts: tuple[Word, ...], told_first: bool) -> None:
    """Each tier has a ledger of its own, and the id has one stream for both."""
    for life in ways(verdicts, told_first=told_first):
        for tier in (INTERACTIVE, BATCH):
            for accounts in readers(life, tier):
                counter = accounts.counters(TENANT).get("", NEW)
                assert (counter.running, counter.held, accounts.queues.total("m v1")) == (0, 0, 0), (tier, life)


@pytest.mark.parametrize("told_first", [True, False])
@pytest.mark.parametrize(
    "verdicts", [(A0,), (A0, R0), (A0, R1), (A1, R0), (A0, A1), (A0, A1, R0), (A0, A1, R1)], ids=str
)
def test_whoever_runs_what_was_refused_before_it_began_or_let_in_twice_is_told_to_stop_and_nobody_else(
    verdicts: tuple[Word, ...], told_first: bool
) -> None:
    """Whoever lets something in after its id has ended, as it was told, can't be told from one who lets it in again."""
    twice, some_begun = {A0, A1} <= {*verdicts}, set()
    for life in ways(verdicts, told_first=told_first):
        begun = any(isinstance(told, InferenceStarted) for told in life)
        last = max(offset for offset, told in enumerate(life) if isinstance(told, InferenceAdmitted))
        late = any(isinstance(told, InferenceCompleted | InferenceFailed) for told in life[:last])
        assert stopped(life) is (twice or late or not begun), life
        some_begun.add(begun)
    assert some_begun == ({True, False} if {R0, R1} & {*verdicts} else {True})
