"""Grants: signed leave to write to `requests.*`, carried in the record header `grant` (JWT, HS256)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jwt
from jwt.types import Options

from schemas.errors import HeadraceError
from schemas.events import Reply
from schemas.reasons import Reason

ALGORITHM = "HS256"
ISSUER = "headrace"
TOKEN_BYTES_MAX = 4_096
TIERS_MAX = 16
PARTITION_MAX = 2**31 - 1
TIME_MAX_MS = 2**53


@dataclass(frozen=True, slots=True)
class Grant:
    """Who may ask, for which tiers, where the answer goes, and until when (milliseconds since 1970)."""

    tenant: str
    key_id: str
    tiers: tuple[str, ...]
    reply: Reply
    expires_ms: int


_JWT = jwt.PyJWT()
_ONLY_SIGNATURE: Options = {
    "verify_signature": True,
    "verify_exp": False,  # whoever reads it compares the expiry with the record's own time
    "verify_iat": False,
    "verify_nbf": False,
    "verify_aud": False,
    "verify_iss": False,
    "verify_sub": False,
    "verify_jti": False,
}


def mint(secret: bytes, grant: Grant) -> str:
    """The grant as a token: URL-safe text of about 300 bytes."""
    claims = {
        "iss": ISSUER,
        "sub": grant.tenant,
        "key": grant.key_id,
        "tiers": list(grant.tiers),
        "reply": [grant.reply.topic, grant.reply.partition, grant.reply.encoding],
        "exp": grant.expires_ms / 1000,
    }
    return _JWT.encode(claims, secret, ALGORITHM)


def read(secret: bytes, token: str | bytes) -> Grant:
    """The grant in a token that this secret signed; its expiry is not judged.

    Raises HeadraceError (invalid_grant) for anything else.
    """
    if len(token) > TOKEN_BYTES_MAX:
        raise HeadraceError(Reason.INVALID_GRANT, f"the grant is longer than {TOKEN_BYTES_MAX} bytes")
    try:
        claims = _JWT.decode(token, secret, algorithms=[ALGORITHM], options=_ONLY_SIGNATURE)
        return _grant(claims)
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise HeadraceError(
            Reason.INVALID_GRANT, f"the grant can't be read or isn't signed by this deployment: {type(error).__name__}"
        ) from None


def _grant(claims: dict[str, Any]) -> Grant:
    match claims:
        case {
            "iss": str(issuer),
            "sub": str(tenant),
            "key": str(key_id),
            "tiers": list(tiers),
            "reply": [str(topic), int(partition), str(encoding)],
            "exp": int() | float() as expires,
        } if (
            issuer == ISSUER
            and len(tiers) <= TIERS_MAX
            and all(isinstance(tier, str) for tier in tiers)
            and 0 <= partition <= PARTITION_MAX
            and 0 <= expires < TIME_MAX_MS
        ):
            return Grant(tenant, key_id, tuple(tiers), Reply(topic, partition, encoding), round(expires * 1000))
    raise ValueError(f"not a grant: {json.dumps(sorted(claims))[:100]}")
