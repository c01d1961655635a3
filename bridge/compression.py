"""Bodies that travel compressed: requests whose caller says so, and large answers for callers that take them so. Streams go as they are."""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import Request
from starlette.responses import Response

from bridge.heads import heads
from schemas.errors import HeadraceError
from schemas.reasons import Reason

GZIP, DEFLATE = "gzip", "deflate"
CODINGS = (GZIP, DEFLATE)
_ALIASES = {"x-gzip": GZIP}
ANSWER_BYTES_MIN = 32 * 1024
"""A smaller answer isn't worth it."""
LEVEL = 1
_WBITS = {GZIP: 16 + zlib.MAX_WBITS, DEFLATE: zlib.MAX_WBITS}
"""As zlib wants it; deflate stands for zlib's format (RFC 9110), though some send what is in it alone."""
_ZLIB_METHOD = 8


def coding_of(header: str) -> str | None:
    """How a body is compressed, by its `Content-Encoding`; None if it isn't. Raises HeadraceError (invalid_request) for other ways."""
    name = header.strip().lower()
    if name in ("", "identity"):
        return None
    if (found := _ALIASES.get(name, name)) in CODINGS:
        return found
    text = f"Content-Encoding: {name[:64]} isn't taken; {' and '.join(CODINGS)} are"
    raise HeadraceError(Reason.INVALID_REQUEST, text, param="Content-Encoding")


def decompressed(raw: bytes, coding: str, bytes_max: int) -> bytes:
    """A body as it was, of which no more than `bytes_max` is ever held. Blocks.

    Raises HeadraceError: payload_too_large if there is more; invalid_request if it isn't compressed so, breaks off, or has something behind it.
    """
    inflater = zlib.decompressobj(_window(raw, coding))
    try:
        found = inflater.decompress(raw, bytes_max + 1)
    except zlib.error as error:
        raise _broken(f"the body isn't {coding}: {error}") from None
    if len(found) > bytes_max:
        text = f"the body has more than {bytes_max} bytes once it is decompressed, the most that is taken"
        raise HeadraceError(Reason.PAYLOAD_TOO_LARGE, text)
    if not inflater.eof:
        raise _broken(f"the body's {coding} breaks off")
    if inflater.unused_data:
        raise _broken(f"something follows on the body's {coding}")
    return found


def _window(raw: bytes, coding: str) -> int:
    if coding == DEFLATE:
        headed = len(raw) > 1 and raw[0] & 0x0F == _ZLIB_METHOD and int.from_bytes(raw[:2], "big") % 31 == 0
        return zlib.MAX_WBITS if headed else -zlib.MAX_WBITS
    return _WBITS[coding]


def _broken(text: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, text)


def accepted(header: str) -> str | None:
    """The way that a caller likes best by its `Accept-Encoding`, or None: what it doesn't name, or gives no weight, isn't taken."""
    weights: dict[str, float] = {}
    for part in header.lower().split(","):
        name, _, rest = part.partition(";")
        weights[_ALIASES.get(name.strip(), name.strip())] = _weight(rest)
    best = max(CODINGS, key=lambda coding: weights.get(coding, 0.0))
    return best if weights.get(best, 0.0) > 0 else None


def _weight(parameter: str) -> float:
    name, _, value = parameter.partition("=")
    try:
        return float(value) if name.strip() == "q" else 1.0
    except ValueError:
        return 0.0


async def compressed(request: Request, answer: Response) -> Response:
    """The answer, compressed if it is large, its caller takes it so, and that makes it smaller."""
    if len(answer.body) < ANSWER_BYTES_MIN:
        return answer
    answer.headers.add_vary_header("Accept-Encoding")
    coding = accepted(heads(request).get("accept-encoding", ""))
    if coding is None:
        return answer
    body = await asyncio.to_thread(_deflated, bytes(answer.body), coding)
    if len(body) < len(answer.body):
        answer.body = body
        answer.headers["Content-Length"] = str(len(body))
        answer.headers["Content-Encoding"] = coding
    return answer


def _deflated(body: bytes, coding: str) -> bytes:
    deflater = zlib.compressobj(LEVEL, zlib.DEFLATED, _WBITS[coding])
    return deflater.compress(body) + deflater.flush()
