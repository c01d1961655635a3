"""What of a tenant's goes on, given which keys hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decisions.ledger import Cost, Hold
from decisions.ledger_rows import Open
from decisions.revocation import barred, good_keys
from schemas.events import ApiKey, Reply, TenantChanged
from schemas.topics import INTERACTIVE, TOKENS
from tests.decisions.worlds import NOW


def tenant(*revoked: bool, disabled: bool = False) -> TenantChanged:
    """With keys `k0`, `k1` and so on."""
    keys = [
        ApiKey(f"k{number}", "0" * 64, (INTERACTIVE,), 0, NOW if gone else None) for number, gone in enumerate(revoked)
    ]
    return TenantChanged("acme", "salt", tuple(keys), 0, disabled)


def opened(*keys: str) -> dict[str, Open]:
    """Requests `r0`, `r1` and so on, asked with these."""
    hold = Hold(NOW, Cost(5))
    return {f"r{number}": Open(hold, NOW, Reply(TOKENS, 0), key_id=key) for number, key in enumerate(keys)}


def test_what_was_asked_with_a_key_that_is_revoked_now_is_barred_and_nothing_else() -> None:
    assert barred(opened("k0", "k1", "k0"), tenant(True, False)) == ["r0", "r2"]
    assert barred(opened("k0", "k1"), tenant(False, False)) == []


def test_of_a_tenant_that_is_shut_out_everything_is() -> None:
    assert barred(opened("k0", "k1", ""), tenant(False, False, disabled=True)) == ["r0", "r1", "r2"]


def test_who_is_newer_than_what_was_read_goes_on() -> None:
    assert barred(opened("k0", "another"), tenant(False)) == []
    assert barred(opened("k0"), None) == []


def test_what_an_older_release_let_in_goes_on() -> None:
    """Its row doesn't say with which key."""
    assert barred(opened(""), tenant(True)) == []


@given(st.lists(st.booleans(), max_size=4), st.lists(st.sampled_from(["", "k0", "k1", "k2", "k3", "k9"]), max_size=8))
def test_what_is_barred_has_a_known_key_that_is_not_good_and_all_such_are(revoked: list[bool], keys: list[str]) -> None:
    one, requests = tenant(*revoked), opened(*keys)
    bad = {key.key_id for key in one.keys} - good_keys(one)
    gone = set(barred(requests, one))
    assert {requests[name].key_id for name in gone} <= bad
    assert not {requests[name].key_id for name in requests.keys() - gone} & bad
