"""The check that refuses stop strings beyond the limits before the text fold builds its matcher of them."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import HeadraceError
from schemas.parts import STOP_CHARS_MAX, STOPS_MAX
from schemas.reasons import Reason


def check_stops(stops: Sequence[str], *, param: str = "sampling.stop") -> None:
    """Raise HeadraceError (invalid_request) unless there are at most STOPS_MAX stop strings, none empty, none longer
    than STOP_CHARS_MAX, none with an unpaired surrogate.
    """
    if len(stops) > STOPS_MAX:
        raise _invalid(f"{len(stops)} stop strings are given; at most {STOPS_MAX} are served", param)
    for place, stop in enumerate(stops):
        where = f"{param}[{place}]"
        if not stop:
            raise _invalid("a stop string is empty", where)
        if len(stop) > STOP_CHARS_MAX:
            raise _invalid(f"a stop string has {len(stop)} characters; at most {STOP_CHARS_MAX} are served", where)
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise _invalid("a stop string holds an unpaired surrogate", where)


def _invalid(message: str, param: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, message, param=param)
