"""Bounds on what a caller may ask of the text fold, and the checks that refuse what passes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas.errors import HeadraceError
from schemas.reasons import Reason

MAX_STOPS = 16
MAX_STOP_CHARS = 256


def check_stops(stops: Sequence[str], *, param: str = "sampling.stop") -> None:
    """Raise HeadraceError (invalid_request) unless there are at most MAX_STOPS stop strings, none empty, none longer
    than MAX_STOP_CHARS, none with an unpaired surrogate.
    """
    if len(stops) > MAX_STOPS:
        raise _invalid(f"{len(stops)} stop strings are given; at most {MAX_STOPS} are served", param)
    for place, stop in enumerate(stops):
        where = f"{param}[{place}]"
        if not stop:
            raise _invalid("a stop string is empty", where)
        if len(stop) > MAX_STOP_CHARS:
            raise _invalid(f"a stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are served", where)
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise _invalid("a stop string holds an unpaired surrogate", where)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raise HeadraceError (invalid_request) that names `param` for an id outside 0 to `vocab_size - 1`."""
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise _invalid(f"token id {token_id} is not between 0 and {vocab_size - 1}", f"{param}[{place}]")


def _invalid(message: str, param: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, message, param=param)
