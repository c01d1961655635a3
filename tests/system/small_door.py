"""The front door of the shared stack as callers of its small models meet it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.system.fixtures_small import SmallModels
from tests.system.running import CALL_WAIT_S, RunningStack


def key(stack: RunningStack) -> dict[str, str]:
    return {"Authorization": f"Bearer {stack.keys['acme']}"}


def door(stack: RunningStack, small: SmallModels) -> httpx.Client:
    return httpx.Client(base_url=small.url, headers=key(stack), timeout=CALL_WAIT_S, trust_env=False)


def async_door(stack: RunningStack, small: SmallModels) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=small.url, headers=key(stack), timeout=CALL_WAIT_S, trust_env=False)


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}
