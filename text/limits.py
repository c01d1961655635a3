"""Bounds on the stop strings of the text fold, and the check that refuses what passes them."""

from __future__ import annotations

from collections.abc import Sequence

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


def _invalid(message: str, param: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, message, param=param)
