"""What is refused uses up nothing: whatever the reason, every limit of the tenant is as it was before."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from decisions import admission, places
from decisions.accounts import Accounts
from decisions.cases import Case
from decisions.ledger import Counters
from decisions.quota import EACH, KINDS, gauges, limits_for
from decisions.verdicts import rejected as refusal_of
from schemas.events import Quota, Reply, Sampling
from schemas.reasons import Reason
from schemas.topics import INTERACTIVE
from tests.decisions.judging import ASKED, COST, PROMPT, decide
from tests.decisions.ledger_site import event_of
from tests.decisions.ledgers import Asked, admitted, ending, quota, rejected
from tests.decisions.telling import let_in, restored, tell
from tests.decisions.worlds import NOW, WORK, FakeGrant, FakeWorld, case, worker

PLENTY = 1_000_000
SCOPES = (("", ""), (EACH, ""), ("", EACH), (EACH, EACH))
"""The tenant as a whole, each of its keys, each model, and each key's use of each model."""
LATER_MS = (0, 30_000, 59_000)
NEXT = Asked(NOW + 10, "next", COST, "k1")
AT = 5
"""Of the record that is refused; earlier ones have used something of every limit."""


def quotas(**limits: Any) -> list[Quota]:
    """All limits in all scopes."""
    each = {kind.field: PLENTY for kind in KINDS} | limits
    return [quota(key, model, **each) for key, model in SCOPES]


@dataclass
class Ledgered(FakeWorld):
    """A world whose tenant has a ledger: one request has ended, one runs, and one is decided and not told."""

    accounts: Accounts = field(default_factory=lambda: Accounts(INTERACTIVE))

    def __post_init__(self) -> None:
        self.limited_by(quotas())
        scopes = tuple(limits_for(quotas(), "k1", "m"))
        for offset, name in enumerate(("ended", "runs")):
            tell(self.accounts, admitted(Asked(NOW, name, 40, "k1"), offset, scopes))
        tell(self.accounts, ending("ended", 30))
        let_in(self.accounts, Asked(NOW, "decided", 40, "k1"), 2, quotas())

    def limited_by(self, found: Iterable[Quota]) -> None:
        self.tenants["acme"] = replace(self.tenants["acme"], quotas=tuple(found))

    def counters(self, partition: int, tenant: str) -> Counters:
        return self.accounts.counters(tenant)


def seen(accounts: Accounts) -> Any:
    """How much of each limit of each scope is used, now and later, what it ever used, and what waits."""
    counters, found = accounts.counters("acme"), list[tuple[int, str, str, int]]()
    assert len(counters) == len(SCOPES)
    for later_ms in LATER_MS:
        measured = gauges(counters, limits_for(quotas(), "k1", "m"), NOW + later_ms)
        found += [(later_ms, one.scope, one.kind.field, one.used) for one in measured]
    totals = {scope: (each.requests_total, each.tokens_total) for scope, each in counters.items()}
    return found, totals, accounts.queues.total("m v1"), sorted(accounts.opened("acme"))


def seen_by_all(accounts: Accounts) -> Any:
    """The same, of who decided and of a newcomer that has what was saved."""
    rows = accounts.save(AT, NOW, last=True)
    accounts.unsaved(rows)
    return seen(accounts), seen(restored(map(event_of, rows)))


# --- what a check refuses --------------------------------------------------------------------------------------------

Way = tuple[Reason, Case, dict[str, Any]]
"""A reason, a request that is refused for it, and what is special about the world then."""
KEY = FakeWorld().tenants["acme"].keys[0]
MODEL = FakeWorld().models["m"]
BUSY = worker("a", {0: 0}, slots=1, running=1, service_ms=60_000.0)


def asking(**changes: Any) -> Case:
    return case(sampling=changes.pop("sampling", ASKED), **changes)


def limit(**limits: int) -> Way:
    return Reason.RATE_LIMITED, asking(), {"quotas": quotas(**limits)}


WAYS: dict[str, Way] = {
    "requests a minute": limit(requests_per_minute=3),
    "tokens a minute": limit(tokens_per_minute=110 + COST - 1),
    "requests at once": limit(concurrent_requests=2),
    "tokens a day": limit(tokens_per_day=110 + COST - 1),
    "tokens a month": limit(tokens_per_month=110 + COST - 1),
    "larger than a limit": limit(tokens_per_minute=COST - 1),
    "before it is tokenised": limit(tokens_per_minute=110),
    "no time left": (Reason.DEADLINE_EXCEEDED, replace(asking(), waited_ms=5_000), {}),
    "the estimate": (Reason.OVERLOADED, asking(timeout_ms=50), {"seen": [BUSY], "ends": {(WORK, 0): 9}}),
    "no worker in time": (Reason.NO_WORKER, asking(timeout_ms=50), {"start_up": 60_000}),
    "queue depth": (
        Reason.OVERLOADED,
        asking(),
        {"models": {"m": replace(MODEL, max_queue_depth={INTERACTIVE: 1})}, "waits": 1},
    ),
    "a model without its topic": (Reason.UNAVAILABLE, asking(), {"topics": {"tokens": 8}}),
    "a revoked key": (Reason.INVALID_API_KEY, asking(), {"keys": (replace(KEY, revoked_ms=NOW - 1),)}),
    "a direct producer's revoked key": (
        Reason.INVALID_GRANT,
        asking(grant=FakeGrant(reply=Reply("tokens.acme", 0))),
        {"keys": (replace(KEY, revoked_ms=NOW - 1),)},
    ),
    "an expired grant": (Reason.GRANT_EXPIRED, asking(grant=FakeGrant(expires_ms=NOW)), {}),
    "another tier": (Reason.PERMISSION_DENIED, asking(grant=FakeGrant(tiers=("batch",))), {}),
    "nowhere to reply": (
        Reason.NOT_FOUND,
        asking(grant=FakeGrant(reply=Reply("tokens.acme", 0))),
        {"topics": {"tokens": 8}},
    ),
    "an unknown model": (Reason.MODEL_NOT_FOUND, asking(model="other"), {}),
    "too large": (
        Reason.PAYLOAD_TOO_LARGE,
        replace(asking(messages=None, prompt="x" * 11), content_bytes_max=10),
        {},
    ),
    "longer than the context": (Reason.CONTEXT_LENGTH_EXCEEDED, asking(sampling=Sampling(max_tokens=100)), {}),
    "a field out of range": (Reason.INVALID_REQUEST, asking(sampling=Sampling(temperature=3.0)), {}),
    "a token that there isn't": (
        Reason.INVALID_REQUEST,
        asking(sampling=Sampling(max_tokens=10, logit_bias={"257": 1.0})),
        {},
    ),
}


def world_of(special: dict[str, Any]) -> Ledgered:
    special = dict(special)
    found, keys = special.pop("quotas", None), special.pop("keys", None)
    world = Ledgered(**special)
    if found is not None:
        world.limited_by(found)
    if keys is not None:
        world.tenants["acme"] = replace(world.tenants["acme"], keys=keys)
    return world


@pytest.mark.parametrize("way", WAYS)
def test_what_a_check_refuses_leaves_every_limit_as_it_was(way: str) -> None:
    reason, given, special = WAYS[way]
    world = world_of(special)
    before = seen_by_all(world.accounts)
    found, refusal = decide(given, world, PROMPT)
    assert refusal is not None and refusal.reason is reason, refusal
    assert way not in {kind.text for kind in KINDS} or f" {way} " in refusal.message
    assert found.reserved is None or found.decisions[-1].check == "place"
    assert seen_by_all(world.accounts) == before
    tell(world.accounts, refusal_of(found, refusal))
    assert seen_by_all(world.accounts) == before


def test_no_reason_that_a_check_can_give_is_left_out() -> None:
    given = {
        name for module in (admission, places) for name in re.findall(r"Reason\.([A-Z_]+)", inspect.getsource(module))
    }
    assert {reason.name for reason, _, _ in WAYS.values()} == given


# --- what is refused for any reason, at any point --------------------------------------------------------------------


def never_let_in(_: Accounts, reason: Reason) -> list[Any]:
    return [rejected(NEXT, AT, reason=reason)]


def let_in_and_not_told(accounts: Accounts, reason: Reason) -> list[Any]:
    """Its work couldn't be sent."""
    accounts.withdraw(let_in(accounts, NEXT, AT, quotas()))
    return [rejected(NEXT, AT, reason=reason)]


def let_in_and_told(accounts: Accounts, reason: Reason) -> list[Any]:
    """It is taken back: its stream has the refusal, so its ending tells of one."""
    told = let_in(accounts, NEXT, AT, quotas())
    return [told, rejected(NEXT, AT, reason=reason), ending("next", 0, source="admission", reason=reason)]


def let_in_by_another(_: Accounts, reason: Reason) -> list[Any]:
    told = admitted(NEXT, AT, tuple(limits_for(quotas(), "k1", "m")))
    return [rejected(NEXT, AT, reason=reason), told, ending("next", 0, source="admission", reason=reason)]


def ended_before_it_is_told(accounts: Accounts, reason: Reason) -> list[Any]:
    return let_in_and_told(accounts, reason)[::-1]


@pytest.mark.parametrize(
    "point",
    [never_let_in, let_in_and_not_told, let_in_and_told, let_in_by_another, ended_before_it_is_told],
    ids=lambda point: point.__name__,
)
def test_what_is_refused_at_any_point_for_any_reason_leaves_every_limit_as_it_was(point: Any) -> None:
    for reason in Reason:
        accounts = Ledgered().accounts
        before = seen_by_all(accounts)
        tell(accounts, *point(accounts, reason))
        assert seen_by_all(accounts) == before, reason


def test_what_is_let_in_is_seen_in_every_limit() -> None:
    """So that the others see what they look for."""
    accounts = Ledgered().accounts
    before, _, waiting, _ = seen(accounts)
    tell(accounts, let_in(accounts, NEXT, AT, quotas()))
    after, totals, waits, opened = seen(accounts)
    assert [one for one, other in zip(before, after, strict=True) if one == other] == []
    assert (waits, "next" in opened) == (waiting + 1, True)
    assert {requests for requests, _ in totals.values()} == {4}
