"""Who calls: a key's hash is looked up among the tenants' keys, and a grant is signed that lets the call's records in."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.directory import TenantDirectory
from infra.grants import Grant, mint, read
from schemas.errors import HeadraceError
from schemas.events import ApiKey, Reply, TenantChanged
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, INTERACTIVE

KEY_CHARS_MAX = 256
GRANTS_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, and the key by which it was known."""

    tenant: str
    key_id: str
    tiers: tuple[str, ...]


class Authenticator:
    """Knows callers by their keys and mints their grants.

    A grant is used again for the same key until half its time is over: signing costs more than the rest of a request's way in.
    """

    def __init__(self, tenants: TenantDirectory, secret: bytes, reply: Reply, grant_ttl_ms: int) -> None:
        self._tenants = tenants
        self._secret = secret
        self.reply = reply
        self._ttl_ms = grant_ttl_ms
        self._grants: OrderedDict[Caller, tuple[int, bytes]] = OrderedDict()

    async def from_headers(self, headers: Mapping[str, str]) -> Caller:
        """The caller whose key stands in `Authorization: Bearer …`. Raises HeadraceError: invalid_api_key, permission_denied, unavailable."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise HeadraceError(Reason.INVALID_API_KEY, "no API key is given; send it as `Authorization: Bearer hr-…`")
        return await self.from_key(key.strip())

    async def from_key(self, key: str) -> Caller:
        """The caller whose key this is. Raises HeadraceError: invalid_api_key; permission_denied if it may not make live calls; unavailable if
        whether it is known can't be told at present.
        """
        found = await self._find(key)
        if found is None:
            raise HeadraceError(Reason.INVALID_API_KEY, "the API key is not known")
        tenant, api_key = found
        if tenant.disabled or api_key.revoked_ms is not None:
            raise HeadraceError(Reason.INVALID_API_KEY, "the API key was revoked")
        if INTERACTIVE not in api_key.tiers:
            raise HeadraceError(Reason.PERMISSION_DENIED, f"the API key may not make {INTERACTIVE} calls")
        return Caller(tenant.tenant, api_key.key_id, api_key.tiers)

    async def _find(self, key: str) -> tuple[TenantChanged, ApiKey] | None:
        """A key that isn't known may be newer than what was read, so the rest is read first."""
        if len(key) > KEY_CHARS_MAX:
            return None
        sha256 = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        found = self._tenants.by_key_hash(sha256)
        if found is None:
            if not await self._tenants.caught_up():
                raise HeadraceError(
                    Reason.UNAVAILABLE,
                    "whether the API key is known can't be told, as the log can't be read; try again",
                )
            found = self._tenants.by_key_hash(sha256)
        return found

    def require(self, caller: Caller) -> None:
        """Raises HeadraceError (invalid_api_key) if the key by which the caller was known holds no more."""
        tenant = self._tenants.tenant(caller.tenant)
        keys = () if tenant is None or tenant.disabled else tenant.keys
        if not any(key.key_id == caller.key_id and key.revoked_ms is None for key in keys):
            raise HeadraceError(Reason.INVALID_API_KEY, "the API key was revoked")

    async def change(self) -> None:
        """Wait until something becomes known of a tenant, from now on."""
        await self._tenants.change()

    def grant(self, caller: Caller, reply: Reply | None = None) -> bytes:
        """A grant that names this bridge's reply partition, or another, good for at least half of `grant_ttl_ms`."""
        now_ms = int(time.time() * 1000)
        expires_ms = now_ms + self._ttl_ms
        if reply is not None and reply != self.reply:
            return self._mint(caller, reply, expires_ms)
        kept = self._grants.get(caller)
        if kept is not None and kept[0] - now_ms > self._ttl_ms // 2:
            self._grants.move_to_end(caller)
            return kept[1]
        token = self._mint(caller, self.reply, expires_ms)
        self._grants[caller] = (expires_ms, token)
        self._grants.move_to_end(caller)
        while len(self._grants) > GRANTS_KEPT_MAX:
            self._grants.popitem(last=False)
        return token

    def reply_of(self, tenant: str, headers: Sequence[tuple[str, bytes]]) -> Reply | None:
        """Where the answer to a record goes, by its grant; None if that isn't a good one of this tenant's."""
        token = dict(headers).get(GRANT_HEADER)
        try:
            found = read(self._secret, token.decode("ascii")) if token is not None else None
        except (HeadraceError, UnicodeDecodeError):
            return None
        return found.reply if found is not None and found.tenant == tenant else None

    def _mint(self, caller: Caller, reply: Reply, expires_ms: int) -> bytes:
        return mint(self._secret, Grant(caller.tenant, caller.key_id, caller.tiers, reply, expires_ms)).encode()
