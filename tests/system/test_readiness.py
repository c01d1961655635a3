"""What the Open Inference Protocol says of a model whose workers come and go: as real processes, by Triton's clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from cli.models import register_versions, version_of
from infra import ports
from infra.models_file import ModelEntry
from tests import onnx_models
from tests.system.fixtures_models import register, worker
from tests.system.running import CALL_WAIT_S, RunningStack

DOOR, WORKER = "bridge-readiness", "waking-a"
WAKING, BROKEN = "waking", "broken"

Told = tuple[bool, bool, str, str, bool]
"""Whether it is ready, over REST and over gRPC; its state in the index of each; whether both give one reason."""
READY: Told = (True, True, "READY", "READY", True)
UNAVAILABLE: Told = (False, False, "UNAVAILABLE", "UNAVAILABLE", True)
UNHEARD_OF: Told = (False, False, "", "", True)
"""Registered, which this front door hasn't read yet."""


@pytest.fixture(scope="module")
def told(stack: RunningStack) -> Iterator[Callable[[str], Told]]:
    """What a front door of its own says of a model."""
    port, grpc_port = ports.free_port(), ports.free_port()
    stack.add(DOOR, "bridge", "--port", str(port), HEADRACE_BRIDGE_GRPC_PORT=str(grpc_port))
    key = {"authorization": f"Bearer {stack.keys['acme']}"}

    def ask(model: str) -> Told:
        over_http = {item["name"]: item for item in rest.get_model_repository_index(headers=dict(key))}.get(model)
        over_grpc = {item.name: item for item in grpc.get_model_repository_index(headers=key).models}.get(model)
        if over_http is None or over_grpc is None:
            return UNHEARD_OF
        ready = rest.is_model_ready(model, "1", headers=dict(key)), grpc.is_model_ready(model, "1", headers=key)
        return *ready, over_http["state"], over_grpc.state, over_http["reason"] == over_grpc.reason

    try:
        stack.await_ready(DOOR)
        with (
            http_client.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=CALL_WAIT_S) as rest,
            grpc_client.InferenceServerClient(f"127.0.0.1:{grpc_port}") as grpc,
        ):
            yield ask
    finally:
        stack.remove(DOOR)


def test_a_model_is_ready_while_a_worker_runs_and_not_before_or_after(
    stack: RunningStack, told: Callable[[str], Told]
) -> None:
    register(stack, ModelEntry(WAKING, "1", "scripted", "scripted", 4096, slots=2, partitions=1))
    stack.until(lambda: told(WAKING) == UNAVAILABLE)
    with worker(stack, WORKER, WAKING):
        stack.until(lambda: told(WAKING) == READY)
        stack.stop(WORKER)
        stack.until(lambda: told(WAKING) == UNAVAILABLE)
        stack.restart(WORKER)
        stack.until(lambda: told(WAKING) == READY)
        stack.pause(WORKER)
        stack.until(lambda: told(WAKING) == UNAVAILABLE)
        stack.resume(WORKER)
        stack.until(lambda: told(WAKING) == READY)
    stack.until(lambda: told(WAKING) == UNAVAILABLE)


def test_a_model_whose_file_does_not_load_is_never_ready(
    stack: RunningStack, told: Callable[[str], Told], tmp_path: Path
) -> None:
    folder = onnx_models.picking(tmp_path / BROKEN)
    version = version_of(ModelEntry(BROKEN, "1", "onnx", str(folder), 512, slots=1), stack.data_dir, lambda _text: None)
    stack.thread.run(register_versions(stack.kafka, [version]))
    (folder / "model.onnx").write_bytes(b"cut off")
    stack.add(BROKEN, "worker", BROKEN, "1")
    try:
        seen: list[Told] = []

        def started_again() -> bool:
            seen.append(told(BROKEN))
            return any(child.restarts for child in stack.supervisor.status() if child.name == BROKEN)

        stack.until(lambda: stack.reports(BROKEN))  # it has begun to load
        stack.until(started_again)
        said = {told[:4] for told in seen}  # the reason may change between two questions
        assert said - {UNHEARD_OF[:4]} == {UNAVAILABLE[:4]}
    finally:
        stack.remove(BROKEN)
