"""Which keys of a tenant hold, and which of its open requests were asked with one that holds no more: these are ended."""

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
    """The open requests of a tenant that is shut out, or whose key is known to be revoked, the oldest first.

    A tenant or key that isn't known goes on: whoever let it in knew it, so that it is only newer than what was read here. Nor does a row of an
    older release say with which key something was asked.
    """
    if tenant is None:
        return []
    if tenant.disabled:
        return list(opened)
    revoked = {key.key_id for key in tenant.keys if key.revoked_ms is not None}
    if not revoked:  # as of most: what is open may be tens of thousands
        return []
    return [request_id for request_id, one in opened.items() if one.key_id in revoked]
