"""Priority reservation: a share of a pool's capacity that a tenant can count on, and that others may use only while enough is left.

What a tenant is guaranteed and doesn't use is kept free for it. So a tenant within its guarantee always finds room, and what nobody is
guaranteed goes to whoever comes. Capacity and use are in the same unit (slots, or tokens a minute) and are a pool's, over all partitions.
"""

from __future__ import annotations

from collections.abc import Mapping


def kept(guaranteed: Mapping[str, int], in_use: Mapping[str, int]) -> int:
    """What of a pool is taken: in use, or kept free for those who are guaranteed it. At most the capacity, if `has_room` lets all in."""
    tenants = guaranteed.keys() | in_use.keys()
    return sum(max(guaranteed.get(tenant, 0), in_use.get(tenant, 0)) for tenant in tenants)


def has_room(capacity: int, guaranteed: Mapping[str, int], in_use: Mapping[str, int], tenant: str, amount: int) -> bool:
    """Whether a tenant may take an amount more: within its guarantee always, beyond it from what nobody is guaranteed."""
    own = in_use.get(tenant, 0) + amount
    return own <= guaranteed.get(tenant, 0) or kept(guaranteed, {**in_use, tenant: own}) <= capacity


def can_guarantee(capacity: int, guaranteed: Mapping[str, int]) -> bool:
    """Whether a pool can keep these promises all at once. Judged when they are given; should it shrink later, they share what is left."""
    return all(amount > 0 for amount in guaranteed.values()) and sum(guaranteed.values()) <= capacity
