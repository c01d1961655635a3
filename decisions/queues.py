"""Who waits for a pool's workers: of each tenant, the requests that were let in and that no worker has begun."""

from __future__ import annotations

from collections.abc import Collection

from schemas.events import InferenceAdmitted, InferenceStarted


def pool(event: InferenceAdmitted | InferenceStarted) -> str:
    """The name of what serves a request: the model's and the version's, neither of which has a space; of one from the response cache nobody's."""
    if isinstance(event, InferenceAdmitted) and event.cached:
        return ""
    return pool_name(event.model, event.version)


def pool_name(model: str, version: str) -> str:
    """The same of a version."""
    return f"{model} {version}"


class Queues:
    """By pool and tenant, request ids. Adding one again changes nothing, nor does removing one that isn't there."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: dict[str, dict[str, set[str]]] = {}

    def add(self, pool: str, tenant: str, request_id: str) -> None:
        """It waits."""
        self._waiting.setdefault(pool, {}).setdefault(tenant, set()).add(request_id)

    def remove(self, pool: str, tenant: str, request_id: str) -> None:
        """It no longer does."""
        tenants = self._waiting.get(pool, {})
        ids = tenants.get(tenant, set())
        ids.discard(request_id)
        if not ids and tenant in tenants:
            del tenants[tenant]
            if not tenants:
                del self._waiting[pool]

    def forget(self, tenant: str) -> None:
        """Nothing of a tenant waits."""
        for name, tenants in list(self._waiting.items()):
            tenants.pop(tenant, None)
            if not tenants:
                del self._waiting[name]

    def count(self, pool: str, tenant: str) -> int:
        """How many of a tenant wait."""
        return len(self._waiting.get(pool, {}).get(tenant, ()))

    def total(self, pool: str) -> int:
        """How many wait at all."""
        return sum(map(len, self._waiting.get(pool, {}).values()))

    def tenants(self, pool: str) -> Collection[str]:
        """Who waits at all."""
        return self._waiting.get(pool, {}).keys()
