"""A grant is believed only when this deployment signed it, whole."""

from __future__ import annotations

import base64
import json

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.grants import Grant, mint, read
from schemas.errors import HeadraceError
from schemas.events import Reply
from schemas.reasons import Reason

SECRET = b"0123456789abcdef" * 4
GRANT = Grant("acme", "k1", ("interactive", "batch"), Reply("tokens.acme", 3, "json"), 1_800_000_000_123)
CLAIMS = {
    "iss": "headrace",
    "sub": "acme",
    "key": "k1",
    "tiers": ["batch"],
    "reply": ["tokens", 0, "avro"],
    "exp": 1.0,
}


def refused(token: str | bytes) -> None:
    with pytest.raises(HeadraceError) as caught:
        read(SECRET, token)
    assert caught.value.reason is Reason.INVALID_GRANT
    assert SECRET.decode() not in str(caught.value)


def signed(claims: object, algorithm: str = "HS256") -> str:
    return jwt.PyJWS().encode(json.dumps(claims).encode(), SECRET if algorithm != "none" else "", algorithm)


@given(
    st.text(max_size=40), st.lists(st.text(max_size=10), max_size=8), st.integers(0, 2**31 - 1), st.integers(0, 2**45)
)
def test_what_was_minted_is_read(name: str, tiers: list[str], partition: int, expires_ms: int):
    grant = Grant(name, name, tuple(tiers), Reply(name, partition), expires_ms)
    assert read(SECRET, mint(SECRET, grant)) == grant


def test_an_expired_grant_is_read_too_and_in_bytes():
    old = Grant("acme", "k1", (), Reply("tokens", 0), 1)
    assert read(SECRET, mint(SECRET, old).encode()) == old


def test_another_secret_or_a_changed_byte_is_refused():
    token = mint(SECRET, GRANT)
    refused(mint(SECRET[::-1], GRANT))
    header, body, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["sub"] = "other"
    forged = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    refused(f"{header}.{forged}.{signature}")
    refused(f"{header}.{body}.{signature[:-4]}AAAA")
    refused(f"{header}.{body}.")


@pytest.mark.parametrize("algorithm", ["none", "HS512"])
def test_another_algorithm_is_refused(algorithm: str):
    refused(signed(CLAIMS, algorithm))


@pytest.mark.parametrize("token", [b"", b"\xff\x00", "a.b.c", "....", "é", b"x" * 5_000, "[" * 4_000])
def test_junk_is_refused(token: str | bytes):
    refused(token)


@pytest.mark.parametrize(
    "change",
    [
        {"iss": "else"},
        {"sub": 1},
        {"tiers": "batch"},
        {"tiers": [1]},
        {"tiers": ["x"] * 17},
        {"reply": []},
        {"reply": ["t", -1, "avro"]},
        {"reply": ["t", 2**31, "avro"]},
        {"exp": "soon"},
        {"exp": -1},
        {"exp": 1e300},
        {"exp": None},
        {"crit": ["x"]},
    ],
)
def test_signed_claims_of_another_shape_are_refused(change: dict[str, object]):
    if "crit" in change:
        refused(signed([1, 2]))
    else:
        refused(signed({**CLAIMS, **change}))
    assert read(SECRET, signed(CLAIMS)).tenant == "acme"
