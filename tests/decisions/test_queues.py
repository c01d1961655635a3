from __future__ import annotations

from dataclasses import replace

import pytest

from decisions.accounts import Accounts
from decisions.ledger import Cost
from decisions.queues import Queues
from decisions.quota import limits_for, reserve
from schemas.events import (
    Attempt,
    InferenceAdmitted,
    InferenceCompleted,
    InferenceFailed,
    InferenceRejected,
    InferenceStarted,
    Position,
    Reply,
    Timings,
    Usage,
)
from tests.decisions.ledger_site import saved

POOL, T = "m v1", 1_800_000_000_000
ADMITTED = InferenceAdmitted(
    "r1", "acme", "k1", "m", "v1", "interactive", Reply("tokens", 0), "work.m.v1.interactive", 0, 3, 5, 8, T, T + 60_000,
    Position("requests.interactive", 0, 7),
)  # fmt: skip
STARTED = InferenceStarted("r1", "acme", "m", "v1", "interactive", Attempt(1, 1), "w", 0.0, Position("tokens", 0, 1))
COMPLETED = InferenceCompleted("r1", "acme", "m", "v1", "interactive", Attempt(1, 1), (), Usage(3, 5), Timings(), "w")
FAILED = InferenceFailed("r1", "acme", "m", "v1", "interactive", "cancelled", "")
REJECTED = InferenceRejected("r1", "acme", "m", "interactive", "payload_too_large", "", source=ADMITTED.source)


def test_a_pool_has_all_that_wait_for_it() -> None:
    queues = Queues()
    for pool, tenant, name in ((POOL, "a", "1"), (POOL, "a", "2"), (POOL, "b", "3"), ("other v1", "a", "4")):
        queues.add(pool, tenant, name)
    assert (queues.total(POOL), queues.total("nobody v1")) == (3, 0)


def test_who_was_added_twice_waits_once_and_who_is_not_there_can_be_removed() -> None:
    queues = Queues()
    queues.add(POOL, "acme", "r1")
    queues.add(POOL, "acme", "r1")
    queues.add(POOL, "acme", "r2")
    assert (queues.count(POOL, "acme"), set(queues.tenants(POOL))) == (2, {"acme"})
    queues.remove(POOL, "acme", "r1")
    queues.remove(POOL, "other", "r1")
    queues.remove("x y", "acme", "r1")
    assert queues.count(POOL, "acme") == 1
    queues.forget("acme")
    assert (queues.count(POOL, "acme"), set(queues.tenants(POOL))) == (0, set())


@pytest.fixture
def accounts() -> Accounts:
    return Accounts("interactive")


def take(accounts: Accounts) -> None:
    found = reserve(accounts.counters("acme"), limits_for([], "k1", "m"), Cost(8), T)
    accounts.take(found, ADMITTED)  # type: ignore[arg-type]  # there is no limit


@pytest.mark.parametrize("decided_here", [True, False])
@pytest.mark.parametrize("last", [STARTED, COMPLETED, FAILED])
def test_a_request_waits_from_its_admission_until_it_begins_or_ends(
    accounts: Accounts, decided_here: bool, last: object
) -> None:
    if decided_here:
        take(accounts)
        assert accounts.queues.count(POOL, "acme") == 1
    accounts.apply(0, T, ADMITTED)
    assert accounts.queues.count(POOL, "acme") == 1
    accounts.apply(1, T, last)
    accounts.apply(2, T, last)
    assert accounts.queues.count(POOL, "acme") == 0


def test_a_late_refusal_of_what_was_let_in_leaves_it_waiting(accounts: Accounts) -> None:
    accounts.apply(0, T, ADMITTED)
    accounts.apply(1, T, REJECTED)
    assert accounts.queues.count(POOL, "acme") == 1


def test_what_was_taken_and_never_told_waits_no_more(accounts: Accounts) -> None:
    take(accounts)
    accounts.withdraw(ADMITTED)
    assert accounts.queues.count(POOL, "acme") == 0


def test_an_ending_that_is_told_first_leaves_nobody_waiting(accounts: Accounts) -> None:
    accounts.apply(0, T, FAILED)
    take(accounts)
    accounts.apply(1, T, ADMITTED)
    assert accounts.queues.count(POOL, "acme") == 0


def test_a_newcomer_knows_by_the_rows_who_waits_and_who_has_begun(accounts: Accounts) -> None:
    accounts.apply(0, T, ADMITTED)
    accounts.apply(1, T, replace(ADMITTED, request_id="r2", source=replace(ADMITTED.source, offset=8)))
    accounts.apply(2, T, STARTED)
    newcomer = Accounts("interactive")
    for row in saved(accounts, 9, T):
        newcomer.restore(row)
    assert newcomer.queues.count(POOL, "acme") == 1
    assert newcomer.open_requests("acme", POOL) == 2
    newcomer.apply(3, T, COMPLETED)
    assert newcomer.queues.count(POOL, "acme") == 1
    newcomer.apply(4, T, replace(COMPLETED, request_id="r2"))
    assert newcomer.queues.count(POOL, "acme") == 0
    assert newcomer.open_requests("acme", POOL) == 0
