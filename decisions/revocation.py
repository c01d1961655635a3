"""Which keys of a tenant hold, and which of its open requests were asked with one that holds no more: these are cancelled."""

from __future__ import annotations

from collections.abc import Mapping

from decisions.ledger_rows import Open
from schemas.events import TenantChanged


def good_keys(tenant: TenantChanged | None) -> set[str]:
    """The keys that a tenant's requests may carry now."""
    if tenant is None or tenant.disabled:
        return set()
    return {key.key_id for key in tenant.keys if key.revoked_ms is None}


def barred(opened: Mapping[str, Open], tenant: TenantChanged | None) -> list[str]:
    """The open requests of a tenant whose key holds no more, the oldest first. Of which key one is may not be known: a row of an older release
    doesn't say it, and then it goes on.
    """
    good = good_keys(tenant)
    return [request_id for request_id, one in opened.items() if one.key_id and one.key_id not in good]
