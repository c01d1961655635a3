"""The way to the front door that commands share: its address, the key, and a client whose troubles are told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cli.chat import make_client, refusal
from cli.context import default_key, front_door_url
from schemas.errors import HeadraceError
from schemas.reasons import Reason

if TYPE_CHECKING:
    import httpx

URL = click.option("--url", help="The front door (HEADRACE_URL; default: the one that `headrace up` runs).")
KEY = click.option("--key", help="The API key (HEADRACE_API_KEY; default: the one that `headrace up` made).")


@contextmanager
def front_door(url: str | None, key: str | None) -> Iterator[httpx.Client]:
    """A client. Raises HeadraceError: invalid_api_key if there is none, unavailable if the front door can't be reached."""
    import httpx

    given_key = key or default_key()
    if not given_key:
        raise HeadraceError(
            Reason.INVALID_API_KEY,
            "there is no API key: give --key or HEADRACE_API_KEY (`headrace tenants create NAME` makes one)",
        )
    if not given_key.isascii():
        raise HeadraceError(Reason.INVALID_API_KEY, "an API key has letters, digits, - and _ only")
    address = (url or front_door_url()).rstrip("/")
    with make_client(address, given_key) as client:
        try:
            yield client
        except httpx.TransportError as error:
            reached = isinstance(error, httpx.ReadTimeout | httpx.RemoteProtocolError | httpx.ReadError)
            what = "broke off" if reached else "can't be reached"
            text = f"the front door at {address} {what}: {str(error) or type(error).__name__}"
            raise HeadraceError(Reason.UNAVAILABLE, text) from error


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to one call. Raises HeadraceError with the front door's own words."""
    response = client.post(path, json=body)
    if response.status_code != 200:
        raise refusal(response)
    found = response.json()
    assert isinstance(found, dict)
    return found
