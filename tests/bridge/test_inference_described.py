"""Requests made from what OpenAPI descriptions say, right and wrong ones: none is answered by a fault of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from bridge.openapi import document
from tests.bridge.conftest import KEY, MODEL, RunningBridge
from tests.bridge.published import PUBLISHED
from tests.bridge.reporting import ready_workers
from tests.bridge.tensors import FILES, RANKS, SUM, identity

EXAMPLES = 12
SERVED = (SUM, RANKS, FILES, MODEL, identity("BYTES"), identity("FP32"))
MODELS = st.sampled_from([*SERVED, "nobody", "ä/%00"])
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
PLAIN_SCHEMA = json.loads(json.dumps(document()))


def operations(described: dict[str, Any]) -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(described)
    found: Any = (result.ok() for result in schema.get_all_operations())  # type: ignore[union-attr] # or it raises
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


OPERATIONS = {
    **{f"ours {name}": operation for name, operation in operations(PLAIN_SCHEMA).items()},
    **{f"published {name}": operation for name, operation in operations(PUBLISHED).items()},
}


RIGHT = [(name, GenerationMode.POSITIVE) for name in OPERATIONS]
WRONG = [(name, GenerationMode.NEGATIVE) for name in OPERATIONS if " POST " in name]


@pytest.fixture(scope="module", autouse=True)
def workers(bridge: RunningBridge) -> Iterator[None]:
    """A model without one is answered by 503."""
    with ready_workers(bridge, *SERVED):
        yield


@pytest.mark.parametrize(("name", "mode"), [*RIGHT, *WRONG])
def test_no_request_is_answered_by_a_fault(bridge: RunningBridge, name: str, mode: GenerationMode) -> None:
    operation = OPERATIONS[name]

    @given(case=operation.as_strategy(generation_mode=mode), model=MODELS, version=st.sampled_from(["v1", "v2"]))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any, model: str, version: str) -> None:
        if "/v2/models/" in operation.path:
            case.path_parameters = {"model": model, **({"version": version} if "{version}" in operation.path else {})}
        headers = {"Authorization": f"Bearer {KEY}"}
        case.call_and_validate(base_url=bridge.url, headers=headers, timeout=30, checks=CHECKS)

    ask()
