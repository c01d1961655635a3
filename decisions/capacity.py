"""Priority reservation: a share of a pool's capacity that a tenant can count on, and that others may use only while enough is left.

What a tenant is guaranteed and doesn't use is kept free for it. So a tenant within its guarantee always finds room, and what nobody is
guaranteed goes to whoever comes. A share is promised in percent of a model's slots on a tier (`Quota.reserved_percent`); each worker keeps
it of its own slots, so it holds however many workers there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from schemas.parts import Quota

PERCENT_MAX = 100
Who = TypeVar("Who", bound=Hashable)


def kept(guaranteed: Mapping[Who, int], in_use: Mapping[Who, int]) -> int:
    """What of a pool is taken: in use, or kept free for those who are guaranteed it. At most the capacity, if `has_room` lets all in."""
    return sum(max(guaranteed.get(who, 0), in_use.get(who, 0)) for who in guaranteed.keys() | in_use.keys())


def has_room(capacity: int, guaranteed: Mapping[Who, int], in_use: Mapping[Who, int], who: Who, amount: int) -> bool:
    """Whether one may take an amount more: within its guarantee always, beyond it from what nobody is guaranteed."""
    own = in_use.get(who, 0) + amount
    return own <= guaranteed.get(who, 0) or kept(guaranteed, {**in_use, who: own}) <= capacity


def can_guarantee(capacity: int, guaranteed: Mapping[Who, int]) -> bool:
    """Whether a pool can keep these promises all at once. Judged when they are given; should it shrink later, they share what is left."""
    return all(amount > 0 for amount in guaranteed.values()) and sum(guaranteed.values()) <= capacity


def reserved_percent(quotas: Iterable[Quota], tier: str, model: str) -> int:
    """What a tenant with these quotas is guaranteed of a model's slots on a tier: 0 for nothing."""
    return next((q.reserved_percent or 0 for q in quotas if (q.tier, q.key_id, q.model) == (tier, "", model)), 0)


def slots_of(percents: Mapping[Who, int], slots: int) -> dict[Who, int]:
    """How many of a worker's slots are whose, rounded up: who is promised anything has at least one, as far as there are any.

    Rounding may ask for more than there are; then the largest shares come first, and of equal ones the first in order.
    """
    found, left = dict[Who, int](), slots
    for who, percent in sorted(percents.items(), key=lambda item: (-item[1], str(item[0]))):
        own = min(left, -(-slots * percent // PERCENT_MAX))
        if own > 0:
            found[who] = own
            left -= own
    return found
