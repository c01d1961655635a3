"""The grant under which a batch job writes: one from a file, or one that is signed here, and signed anew before it expires."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.registry import now_ms
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import BATCH, DAY_MS, MINUTE_MS

if TYPE_CHECKING:
    from infra.settings import KafkaSettings

TTL_MS = DAY_MS
RENEW_MS = 10 * MINUTE_MS
"""So long before its end a grant is signed anew."""
RETRY_MS = MINUTE_MS // 2
"""How soon that is tried again, if it failed and the present one still holds."""
_FIELDS = {"grant": str, "tenant": str, "expires_ms": int}


class Granted:
    """The present grant."""

    def __init__(self, settings: KafkaSettings, tenant: str, file: Path | None, directory: Path) -> None:
        """With a file the tenant is that of its grant. Raises HeadraceError if there is neither a grant nor what signs one."""
        self._settings = settings
        self._file = file
        self._secret = None if file is not None else _secret(directory)
        self._kept: dict[str, Any] = {} if file is None else _read(file)
        self.tenant: str = self._kept.get("tenant", tenant)
        self._signing = asyncio.Lock()
        self._again_ms = 0

    async def header(self) -> bytes:
        """What goes into a record's header. Raises HeadraceError (grant_expired) if the file's has expired."""
        if self._secret is not None and self._due:
            async with self._signing:
                if self._due:  # else one signing served all who waited
                    await self._sign(self._secret)
        elif self._secret is None and self._left_ms <= 0:
            raise expired(self._file, self.tenant)
        return str(self._kept["grant"]).encode()

    @property
    def _left_ms(self) -> int:
        return int(self._kept.get("expires_ms", 0)) - now_ms()

    @property
    def _due(self) -> bool:
        return self._left_ms <= 0 or (self._left_ms < RENEW_MS and now_ms() >= self._again_ms)

    async def _sign(self, secret: bytes) -> None:
        """Anew. If that can't be, the present one is good as long as it holds: a log that is away for a moment ends no job."""
        from aiokafka.errors import KafkaError

        from cli.tenants import grant_for

        try:
            self._kept = await grant_for(self._settings, secret, self.tenant, None, (BATCH,), TTL_MS, "avro")
        except (HeadraceError, KafkaError, OSError):
            if self._left_ms <= 0:
                raise
            self._again_ms = now_ms() + RETRY_MS


def expired(file: Path | None, tenant: str) -> HeadraceError:
    """It no longer holds."""
    how = f"get one by `headrace tenants grant {tenant} --json > {file}`" if file else "the tenant's key may be revoked"
    return HeadraceError(
        Reason.GRANT_EXPIRED, f"the grant doesn't hold any more: {how}, then run the same again to go on"
    )


def _secret(directory: Path) -> bytes:
    from infra.settings import grant_secret

    if not os.environ.get("HEADRACE_GRANT_SECRET") and not (directory / "secrets" / "grant").exists():
        text = "there is nothing here to sign a grant with: give --grant FILE, as `headrace tenants grant NAME --json` prints it"
        raise HeadraceError(Reason.INVALID_GRANT, text)
    return grant_secret(directory)


def _read(file: Path) -> dict[str, Any]:
    try:
        kept = json.loads(file.read_text())
        if not all(type(kept[name]) is kind for name, kind in _FIELDS.items()):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise HeadraceError(
            Reason.INVALID_GRANT, f"{file} holds no grant as `headrace tenants grant NAME --json` prints it"
        ) from None
    return dict(kept)
