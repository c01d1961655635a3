"""A request's headers, made readable once: each look into Starlette's goes through all of them."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

_KEPT = "headrace.heads"


def heads(request: Request) -> Mapping[str, str]:
    """The first value of each header, by its name in lower case."""
    scope = request.scope
    found: dict[str, str] | None = scope.get(_KEPT)
    if found is None:
        lines = reversed(scope["headers"])
        found = scope[_KEPT] = {name.decode("latin-1"): value.decode("latin-1") for name, value in lines}
    return found
