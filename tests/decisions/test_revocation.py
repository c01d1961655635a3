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


def test_a_key_that_is_gone_is_as_good_as_revoked() -> None:
    assert barred(opened("k0", "another"), tenant(False)) == ["r1"]


def test_of_a_tenant_that_is_shut_out_or_gone_everything_is() -> None:
    assert barred(opened("k0", "k1"), tenant(False, False, disabled=True)) == ["r0", "r1"]
    assert barred(opened("k0"), None) == ["r0"]


def test_what_an_older_release_let_in_goes_on() -> None:
    """Its row doesn't say with which key."""
    assert barred(opened(""), tenant(True)) == []


@given(st.lists(st.booleans(), max_size=4), st.lists(st.sampled_from(["", "k0", "k1", "k2", "k3", "k9"]), max_size=8))
def test_what_goes_on_has_a_good_key_or_none_that_is_known(revoked: list[bool], keys: list[str]) -> None:
    one, requests = tenant(*revoked), opened(*keys)
    gone = barred(requests, one)
    left = {requests[name].key_id for name in requests.keys() - set(gone)}
    assert left <= good_keys(one) | {""}
    assert not {requests[name].key_id for name in gone} & (good_keys(one) | {""})
