"""A partition's ledgers for tests: told record by record, asked to let something in, and begun from rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decisions.accounts import Accounts
from decisions.ledger import Cost, Unit, Window
from decisions.quota import Exceeded, limits_for, reserve
from schemas.events import InferenceAdmitted, LedgerSaved, Quota
from schemas.topics import INTERACTIVE
from tests.decisions.ledgers import Asked, admitted
from tests.decisions.worlds import NOW

R = Asked(NOW, "r", 80, "k1")
Q = Asked(NOW, "q", 5, "k1")


def told(*events: Any, first: int = 0, at_ms: int = NOW) -> Accounts:
    """Ledgers that have folded these records, and no others."""
    accounts = Accounts(INTERACTIVE)
    tell(accounts, *events, first=first, at_ms=at_ms)
    return accounts


def tell(accounts: Accounts, *events: Any, first: int | None = None, at_ms: int = NOW) -> None:
    for offset, event in enumerate(events, accounts.next_offset if first is None else first):
        accounts.apply(offset, at_ms, event)


def let_in(accounts: Accounts, asked: Asked = R, offset: int = 0, quotas: Iterable[Quota] = ()) -> InferenceAdmitted:
    """A decision taken here."""
    limits = limits_for(quotas, asked.key, "m")
    found = reserve(accounts.counters(asked.tenant), limits, Cost(asked.tokens), asked.at_ms)
    assert not isinstance(found, Exceeded)
    event = admitted(asked, offset, found.hold.scopes)
    accounts.take(found, event)
    return event


def in_all(accounts: Accounts, tenant: str = "acme", scope: str = "") -> tuple[int, int, int, int]:
    """Requests that run, tokens held, requests in the last minute, tokens used or held in it."""
    counter = accounts.counters(tenant).get(scope)
    if counter is None:
        return 0, 0, 0, 0
    requests, tokens = (counter.used(Window.MINUTE, unit, NOW) for unit in (Unit.REQUESTS, Unit.TOKENS))
    return counter.running, counter.held, requests, tokens


def restored(rows: Iterable[LedgerSaved]) -> Accounts:
    accounts = Accounts(INTERACTIVE)
    for row in rows:
        accounts.restore(row)
    return accounts


NOTHING = 0, 0, 0, 0
RUNS = 1, 80, 1, 80
