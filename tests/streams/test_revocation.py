"""What is open when its key is revoked. No broker: the log is a list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from decisions.accounts import Accounts
from decisions.ledger_rows import Open
from decisions.verdicts import REVOKED_TEXT
from schemas.errors import HeadraceError
from schemas.events import ApiKey, InferenceCancelled, InferenceFailed, Reply, TenantChanged
from schemas.reasons import Reason
from schemas.topics import CONTROL, INTERACTIVE, TOKENS
from streams import revocation
from streams.revocation import FRESH_S, Revocations
from tests.decisions.ledgers import Asked, admitted, ending
from tests.decisions.worlds import NOW, FakeWorld
from tests.streams.test_presence import Log

KEYS = tuple(ApiKey(key_id, "0" * 64, (INTERACTIVE,), 0) for key_id in ("k1", "k2"))


class Site(FakeWorld):
    """A tenant with two keys, and what was let in with them: of the first `r0` and `r2`, of the second `r1`."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.accounts, self.now_s, self.ours = Log(), Accounts(INTERACTIVE), 0.0, True
        self.tenants["acme"] = TenantChanged("acme", "salt", KEYS, 0)
        for number, key in enumerate(("k1", "k2", "k1")):
            asked = Asked(NOW + number, f"r{number}", 5, key)
            self.accounts.apply(number, NOW, admitted(asked, number, reply=Reply(TOKENS, number)))
        self.revocations = Revocations(self, self, self.log, INTERACTIVE, lambda: self.now_s)  # type: ignore[arg-type]

    def opened(self) -> Iterator[tuple[str, Mapping[str, Open]]]:
        return self.accounts.all_opened() if self.ours else iter(())

    def revoke(self, revoked_ms: int | None = NOW) -> None:
        self.tenants["acme"] = TenantChanged("acme", "salt", (replace(KEYS[0], revoked_ms=revoked_ms), KEYS[1]), 0)

    async def look(self, after_s: float = 0.0) -> list[str]:
        """What was ended up to then, by the word to its caller."""
        self.now_s += after_s
        await self.revocations.look()
        return [event.request_id for topic, event in self.log.events if topic == TOKENS]


async def test_what_its_key_has_open_is_ended_once_and_others_go_on() -> None:
    site = Site()
    assert await site.look() == []
    site.revoke()
    for _ in range(3):
        assert await site.look() == ["r0", "r2"]
    (told, ending_of_it), (control, word) = site.log.events[:2]
    assert (told, control, word) == (TOKENS, CONTROL, InferenceCancelled("r0", "acme"))
    assert isinstance(ending_of_it, InferenceFailed)
    assert (ending_of_it.reason, ending_of_it.message, ending_of_it.tier) == (
        "invalid_api_key",
        REVOKED_TEXT,
        INTERACTIVE,
    )


async def test_what_has_ended_meanwhile_is_left_alone() -> None:
    site = Site()
    site.revoke()
    site.accounts.apply(3, NOW, ending("r0", 1))
    assert await site.look() == ["r2"]


async def test_what_was_let_in_just_before_is_found_later() -> None:
    site = Site()
    site.revoke()
    assert await site.look() == ["r0", "r2"]
    site.accounts.apply(3, NOW, admitted(Asked(NOW, "late", 5, "k1"), 3))
    assert await site.look() == ["r0", "r2", "late"]


async def test_what_another_process_decides_is_left_to_it() -> None:
    site = Site()
    site.revoke()
    site.ours = False
    assert await site.look() == []
    site.ours = True
    assert await site.look() == ["r0", "r2"]


async def test_a_key_that_is_revoked_long_after_its_request_began_is_no_other_case() -> None:
    site = Site()
    await site.look()
    assert await site.look(2 * FRESH_S) == []
    site.revoke()
    assert await site.look() == ["r0", "r2"]


async def test_what_the_log_did_not_take_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    site.revoke()

    async def away(*_records: object) -> None:
        raise HeadraceError(Reason.UNAVAILABLE, "the log is away")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(revocation, "deliver", away)
        for after_s in (0, FRESH_S):
            with pytest.raises(HeadraceError):
                await site.look(after_s)
    assert await site.look(FRESH_S) == ["r0", "r2"]


async def test_of_very_many_a_part_is_ended_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "ENDED_AT_ONCE_MAX", 1)
    site = Site()
    site.revoke()
    assert await site.look() == ["r0"]
    assert await site.look() == ["r0", "r2"]
