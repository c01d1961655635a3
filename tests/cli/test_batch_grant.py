"""The grant of a batch job is renewed once for all who need it, and the old one is good as long as it holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from cli import batch_grant, tenants
from cli.batch_grant import RENEW_MS, RETRY_MS, Granted
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.reasons import Reason


class Signing:
    """Stands for the log that a grant is signed from, and for the time."""

    def __init__(self) -> None:
        self.now_ms, self.signed, self.tries = 1_000_000, 0, 0
        self.fault: Exception | None = None

    async def grant_for(self, *_arguments: Any) -> dict[str, Any]:
        self.tries += 1
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        self.signed += 1
        return {"grant": f"g{self.signed}", "expires_ms": self.now_ms + 2 * RENEW_MS}


@pytest.fixture
def signing(monkeypatch: pytest.MonkeyPatch) -> Signing:
    found = Signing()
    monkeypatch.setenv("HEADRACE_GRANT_SECRET", "batch-tests-grant-secret-0123456789abcdef")
    monkeypatch.setattr(tenants, "grant_for", found.grant_for)
    monkeypatch.setattr(batch_grant, "now_ms", lambda: found.now_ms)
    return found


async def test_many_who_need_a_grant_at_once_get_one(signing: Signing, tmp_path: Path) -> None:
    granted = Granted(KafkaSettings(), "acme", None, tmp_path)
    assert set(await asyncio.gather(*(granted.header() for _ in range(50)))) == {b"g1"}
    signing.now_ms += RENEW_MS + 1
    assert set(await asyncio.gather(*(granted.header() for _ in range(50)))) == {b"g2"}


@pytest.mark.parametrize("fault", [KafkaConnectionError("away"), HeadraceError(Reason.UNAVAILABLE, "away")])
async def test_a_grant_is_good_as_long_as_it_holds(signing: Signing, tmp_path: Path, fault: Exception) -> None:
    granted = Granted(KafkaSettings(), "acme", None, tmp_path)
    assert await granted.header() == b"g1"
    signing.now_ms += RENEW_MS + 1
    signing.fault = fault
    assert [await granted.header() for _ in range(5)] == [b"g1"] * 5
    assert signing.tries == 2
    signing.now_ms += RETRY_MS
    assert await granted.header() == b"g1"
    assert signing.tries == 3
    signing.now_ms += RENEW_MS
    with pytest.raises(type(fault)):
        await granted.header()
    signing.fault = None
    assert await granted.header() == b"g2"
