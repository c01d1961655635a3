"""Whether a tenant may ask now: its limits, what it has left of them, and when it may try again.

A tenant's `Quota`s limit it as a whole, each of its keys, and each model. A request must have room in all that match it, for all that it
reserves (prompt + the most it may generate); what is refused uses up nothing. `ledger` counts; `reservations` remembers who holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from decisions.capacity import PERCENT_MAX
from decisions.ledger import ALL_KEYS_AND_MODELS, NEW, Cost, Counter, Counters, Hold, Unit, Window, hold
from schemas.errors import HeadraceError
from schemas.parts import Quota, Rate, Rates
from schemas.quick import quick
from schemas.reasons import Reason
from schemas.remembered import Remembered
from schemas.topics import TIERS, check_model

EACH = "*"
"""As a quota's key or model: every one of them, each counted apart."""
QUOTAS_MAX = 256
"""Quotas of one tenant."""
LIMIT_MAX = 10**12
"""The largest limit: a larger one is a slip of the pen; leave it out for none."""
QUOTAS_KEPT = 4_096
"""Of so many it is remembered which limits they set."""
KEY_CHARS_MAX = 64
ENDING_WAIT_MS = 1_000
"""When to try again if only the ending of something that runs can make room, and nobody knows how long such things run."""
HELD_WAIT_MS = 60_000
"""When to try again at the latest while what runs reserves so much that it could make room by giving back what it doesn't use."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of a quota's limits: its field, its name in words, what it counts, and over which window (None: at once)."""

    field: str
    text: str
    unit: Unit
    window: Window | None


KINDS = (
    Kind("requests_per_minute", "requests a minute", Unit.REQUESTS, Window.MINUTE),
    Kind("tokens_per_minute", "tokens a minute", Unit.TOKENS, Window.MINUTE),
    Kind("concurrent_requests", "requests at once", Unit.RUNNING, None),
    Kind("tokens_per_day", "tokens a day", Unit.TOKENS, Window.DAY),
    Kind("tokens_per_month", "tokens a month", Unit.TOKENS, Window.MONTH),
)


# --- which limits apply ----------------------------------------------------------------------------------------------


def check_quotas(quotas: Sequence[Quota]) -> None:
    """Raises HeadraceError (invalid_request), with the field as `param`, for quotas that can't be meant."""
    if len(quotas) > QUOTAS_MAX:
        raise _invalid("quotas", f"a tenant has at most {QUOTAS_MAX} quotas")
    seen: set[tuple[str, str, str]] = set()
    for index, quota in enumerate(quotas):
        where = f"quotas[{index}]"
        _check_names(quota, where)
        if (counted := (quota.tier, quota.key_id, quota.model)) in seen:
            raise _invalid(where, "another quota limits the same tier, key and model")
        seen.add(counted)
        for kind in KINDS:
            limit = getattr(quota, kind.field)
            if limit is not None and (type(limit) is not int or not 1 <= limit <= LIMIT_MAX):
                raise _invalid(
                    f"{where}.{kind.field}", f"a limit is a whole number from 1 to {LIMIT_MAX}, or left out for none"
                )
        if (percent := quota.reserved_percent) is not None:
            if type(percent) is not int or not 1 <= percent <= PERCENT_MAX:
                raise _invalid(f"{where}.reserved_percent", f"what is reserved is from 1 to {PERCENT_MAX} percent")
            if quota.key_id or quota.model in ("", EACH):
                raise _invalid(
                    where, "slots are reserved of one model, and for all keys together: name the model and no key"
                )


def _check_names(quota: Quota, where: str) -> None:
    if quota.tier not in TIERS:
        raise _invalid(f"{where}.tier", f"a tier is one of {', '.join(TIERS)}")
    if len(quota.key_id) > KEY_CHARS_MAX or any(not char.isprintable() or char.isspace() for char in quota.key_id):
        raise _invalid(
            f"{where}.key_id", f"a key's id has at most {KEY_CHARS_MAX} characters that can be seen; {EACH} means each"
        )
    if quota.model not in ("", EACH):
        try:
            check_model(quota.model)
        except HeadraceError as error:
            raise _invalid(f"{where}.model", f"{error.message}; {EACH} means each") from None


def _invalid(param: str, message: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, message, param=param)


def in_force(own: Sequence[Quota], default: Sequence[Quota], tier: str) -> tuple[Quota, ...]:
    """A tenant's own quotas of a tier, or the default ones of that tier if it has none. A quota without limits counts as one.

    One that only reserves limits nothing: it is in force beside either.
    """
    mine = [quota for quota in own if quota.tier == tier]
    limits = [quota for quota in mine if not only_reserves(quota)]
    return (*(limits or (quota for quota in default if quota.tier == tier)), *(q for q in mine if only_reserves(q)))


def only_reserves(quota: Quota) -> bool:
    """Whether a quota keeps something for its tenant and limits nothing."""
    return quota.reserved_percent is not None and all(getattr(quota, kind.field) is None for kind in KINDS)


def limits_for(quotas: Iterable[Quota], key_id: str, model: str) -> dict[str, Quota]:
    """By scope, the quotas that a request must keep. The tenant's whole is always there, so that it is counted, limited or not.

    Of two quotas that count the same scope, the one that names the key, then the model, holds instead of the one that says each.
    """
    found: dict[str, Quota] = {}
    for quota in quotas:
        if quota.key_id not in ("", EACH, key_id) or quota.model not in ("", EACH, model):
            continue
        scope = scope_of(key_id if quota.key_id else "", model if quota.model else "")
        if scope not in found or _exactness(quota) > _exactness(found[scope]):
            found[scope] = quota
    found.setdefault(ALL_KEYS_AND_MODELS, Quota(""))
    return found


def _exactness(quota: Quota) -> tuple[bool, bool]:
    return quota.key_id != EACH, quota.model != EACH


def scope_of(key_id: str, model: str) -> str:
    """The name of what is counted together, such as `key k1 model m`; neither contains a space."""
    return " ".join(f"{what} {name}" for what, name in (("key", key_id), ("model", model)) if name)


# --- what is left of them --------------------------------------------------------------------------------------------


@quick
@dataclass(frozen=True, slots=True)
class Gauge:
    """One limit and how much of it is in use: reserved + spent."""

    scope: str
    kind: Kind
    limit: int
    used: int
    counter: Counter

    @property
    def remaining(self) -> int:
        """What is left; 0 also when a limit was lowered below what is in use."""
        return self.limit - self.used if self.used < self.limit else 0

    def wait_ms(self, amount: int, now_ms: int) -> int | None:
        """How long until there is room for an amount, if no other request comes and what runs has ended by then.

        0 if there is room now (for nothing there always is), None if there never will be, and `ENDING_WAIT_MS` if nothing but what runs is
        in the way. There is no room sooner, unless something that runs ends and gives back.
        """
        if amount > self.limit:
            return None
        if amount == 0 or self.used + amount <= self.limit:
            return 0
        return self._falls_in_ms(amount, now_ms) or ENDING_WAIT_MS

    def ending(self, amount: int, now_ms: int) -> bool:
        """Whether nothing but what runs is in the way of an amount that isn't over the limit by itself."""
        return self._falls_in_ms(amount, now_ms) == 0

    def _falls_in_ms(self, amount: int, now_ms: int) -> int:
        if self.kind.window is None:
            return 0
        return self.counter.falls_to(self.limit - amount, self.kind.window, self.kind.unit, now_ms) - now_ms

    def retry_ms(self, amount: int, now_ms: int) -> int | None:
        """When it is worth trying again: `wait_ms`, but no later than `HELD_WAIT_MS` if an amount has room as soon as what runs gives enough back.

        A budget of a day may be reserved by requests that use a hundredth of it: then nobody needs to wait until midnight.
        """
        wait_ms = self.wait_ms(amount, now_ms)
        gives_back = self.counter.held if self.kind.unit is Unit.TOKENS and self.kind.window is not None else 0
        if wait_ms is None or self.used - gives_back + amount > self.limit:
            return wait_ms
        return min(wait_ms, HELD_WAIT_MS)


def gauges(counters: Counters, limits: Mapping[str, Quota], now_ms: int) -> list[Gauge]:
    """Every limit of these quotas, as of the record's own time. Scopes without a counter have used nothing."""
    found = []
    for scope, quota in limits.items():
        counter = counters.get(scope, NEW)
        for kind, limit in _limits(quota, None):
            found.append(Gauge(scope, kind, limit, _used(counter, kind, now_ms), counter))
    return found


def _limits_of(quota: Quota, _: None) -> tuple[tuple[Kind, int], ...]:
    """The limits that a quota sets."""
    found = ((kind, getattr(quota, kind.field)) for kind in KINDS)
    return tuple((kind, limit) for kind, limit in found if limit is not None)


_limits = Remembered(_limits_of, QUOTAS_KEPT)


def _used(counter: Counter, kind: Kind, now_ms: int) -> int:
    return counter.running if kind.window is None else counter.used(kind.window, kind.unit, now_ms)


# --- the decision ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Why a request has no room. `retry_after_ms` None: it never will have, under these limits.

    `ending` says that nothing but what runs is in the way: `running` requests, of which `over` must end, if it is known how many.
    """

    message: str
    retry_after_ms: int | None
    ending: bool = False
    running: int = 0
    over: int = 0


@quick
@dataclass(frozen=True, slots=True)
class Reserved:
    """What a request that is let in holds, and the counters as they are then: they count once every other check has let it in, too."""

    hold: Hold
    changed: dict[str, Counter]


def reserve(counters: Counters, limits: Mapping[str, Quota], cost: Cost, now_ms: int) -> Reserved | Exceeded:
    """Let a request in if it has room in every limit, and take it; refused, it changes nothing."""
    refusal = lacking(counters, limits, cost, now_ms)
    return refusal if refusal is not None else Reserved(*hold(counters, limits, cost, now_ms))


def lacking(counters: Counters, limits: Mapping[str, Quota], cost: Cost, now_ms: int) -> Exceeded | None:
    """`exceeded` of all limits. Most requests have room in every one, which is soon seen."""
    return None if _fits(counters, limits, cost, now_ms) else exceeded(gauges(counters, limits, now_ms), cost, now_ms)


def _fits(counters: Counters, limits: Mapping[str, Quota], cost: Cost, now_ms: int) -> bool:
    for scope, quota in limits.items():
        counter = counters.get(scope, NEW)
        for kind, limit in _limits(quota, None):
            if _used(counter, kind, now_ms) + cost.amount(kind.unit) > limit:
                return False
    return True


def crowded(counters: Counters, limits: Mapping[str, Quota], cost: Cost, now_ms: int) -> dict[str, int]:
    """By scope, how many of the requests that run must end before this one has room; none if anything but limits on requests at once is in its way."""
    found = {}
    for gauge in gauges(counters, limits, now_ms):
        amount = cost.amount(gauge.kind.unit)
        if gauge.wait_ms(amount, now_ms) == 0:
            continue
        if gauge.kind.window is not None:
            return {}
        found[gauge.scope] = gauge.used + amount - gauge.limit
    return found


def exceeded(measured: Iterable[Gauge], cost: Cost, now_ms: int) -> Exceeded | None:
    """What keeps a request from being let in now, or None. Of several limits, the one that lasts longest is told."""
    worst: tuple[Gauge, int, int | None] | None = None
    for gauge in measured:
        amount = cost.amount(gauge.kind.unit)
        wait_ms = gauge.retry_ms(amount, now_ms)
        if wait_ms is None:
            worst = gauge, amount, None
            break
        if wait_ms > 0 and (worst is None or wait_ms > (worst[2] or 0)):
            worst = gauge, amount, wait_ms
    if worst is None:
        return None
    gauge, amount, wait_ms = worst
    if wait_ms is None or not gauge.ending(amount, now_ms):
        return Exceeded(_message(*worst), wait_ms)
    over = gauge.used + amount - gauge.limit if gauge.kind.window is None else 0
    return Exceeded(_message(*worst), wait_ms, True, gauge.counter.running, over)


def _message(gauge: Gauge, amount: int, wait_ms: int | None) -> str:
    limit = f"{gauge.limit} {gauge.kind.text} ({gauge.scope or 'all keys and models'})"
    if wait_ms is None:
        return (
            f"The request reserves {amount} tokens (prompt and the most it may generate), and the limit is {limit}: "
            "it can't be served however long it waits. Ask for fewer max_tokens, or send a shorter prompt."
        )
    used = "are running" if gauge.kind.window is None else "are used or reserved"
    when = "when one of them has ended" if gauge.kind.window is None else f"in {duration(wait_ms)}"
    return f"The limit of {limit} is reached: {gauge.used} {used}, and the request needs {amount}. Try again {when}."


# --- what the caller is told -----------------------------------------------------------------------------------------


def rates(measured: Sequence[Gauge], now_ms: int) -> Rates:
    """The limits that a caller meets first: of those with the least left alone it is asked when all is free again."""
    requests: list[Gauge] = []
    tokens: list[Gauge] = []
    for gauge in measured:
        if gauge.kind.window is not None:
            first, left = requests if gauge.kind.unit is Unit.REQUESTS else tokens, gauge.remaining
            if first and left < first[0].remaining:
                first.clear()
            if not first or left == first[0].remaining:
                first.append(gauge)
    return Rates(_told(requests, now_ms), _told(tokens, now_ms))


def _told(first: Sequence[Gauge], now_ms: int) -> Rate | None:
    return tightest(Rate(gauge.limit, gauge.remaining, gauge.wait_ms(gauge.limit, now_ms) or 0) for gauge in first)


def tightest(known: Iterable[Rate]) -> Rate | None:
    """The one with the least left, and of those the one that takes longest to be free; None of none."""
    return min(known, key=lambda rate: (rate.remaining, -rate.reset_ms), default=None)


def headers(told: Rates) -> dict[str, str]:
    """OpenAI's rate-limit headers, in lower case; none for what isn't limited."""
    found = {}
    for name, rate in (("requests", told.requests), ("tokens", told.tokens)):
        if rate is not None:
            found[f"x-ratelimit-limit-{name}"] = str(rate.limit)
            found[f"x-ratelimit-remaining-{name}"] = str(rate.remaining)
            found[f"x-ratelimit-reset-{name}"] = duration(rate.reset_ms)
    return found


def duration(ms: int) -> str:
    """A duration as OpenAI writes it (Go's `time.Duration`): `0s`, `120ms`, `7.66s`, `6m0s`, `26h0m0.5s`."""
    if 0 < ms < 1_000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1_000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds
