"""A language model by gRPC's `ModelStreamInfer`, with Triton's own client."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from infra import ports
from tests.system.running import RunningStack
from tests.system.small_door import key

DOOR = "bridge-llm-grpc"


@contextmanager
def grpc_door(stack: RunningStack) -> Iterator[str]:
    """One more front door, which speaks gRPC, while the block runs. Yields its address."""
    port, grpc_port = ports.free_port(), ports.free_port()
    stack.add(DOOR, "bridge", "--port", str(port), HEADRACE_BRIDGE_GRPC_PORT=str(grpc_port))
    try:
        stack.await_ready(DOOR)
        yield f"127.0.0.1:{grpc_port}"
    finally:
        stack.remove(DOOR)


@dataclass
class TokenStream:
    """One stream, on which requests are asked under names of ours; what came of each, in its order."""

    client: triton.InferenceServerClient
    wait_s: float
    pieces: dict[str, list[str]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    _came: queue.Queue[tuple[Any, Any]] = field(default_factory=queue.Queue)

    def ask(self, name: str, model: str, prompt: str, **parameters: Any) -> None:
        """Asks for a text's continuation, streamed."""
        text, streams = triton.InferInput("text_input", [1], "BYTES"), triton.InferInput("stream", [1], "BOOL")
        text.set_data_from_numpy(np.array([prompt.encode()], dtype=object))
        streams.set_data_from_numpy(np.array([True]))
        self.pieces[name] = []
        self.client.async_stream_infer(model, [text, streams], request_id=name, parameters=parameters)

    def read(self, enough: Callable[[], bool]) -> None:
        """Takes what comes until there is enough."""
        while not enough():
            assert not self.whole(), "there is no more to come"
            result, error = self._came.get(timeout=self.wait_s)
            assert error is None, error
            answer = result.get_response()
            self.pieces[answer.id].append(result.as_numpy("text_output")[0].decode())
            if answer.parameters["triton_final_response"].bool_param:
                self.usage[answer.id] = answer.parameters["completion_tokens"].int64_param

    def whole(self) -> bool:
        """Whether every request has had its last part."""
        return self.usage.keys() == self.pieces.keys()

    def text(self, name: str) -> str:
        """What came of one."""
        return "".join(self.pieces[name])


@contextmanager
def token_stream(stack: RunningStack, address: str, wait_s: float) -> Iterator[TokenStream]:
    """A stream that is open while the block runs, and closed with what still runs on it."""
    with triton.InferenceServerClient(address) as client:
        found = TokenStream(client, wait_s)
        headers = {name.lower(): value for name, value in key(stack).items()}
        client.start_stream(lambda result, error: found._came.put((result, error)), headers=headers)
        try:
            yield found
        finally:
            client.stop_stream(cancel_requests=True)
