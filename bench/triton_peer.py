"""The peer of `batching`: Triton, by pytriton. Runs in a virtual environment of its own, made from a Python that has its shared library.

    PYTHON bench/triton_peer.py MODEL.onnx HTTP_PORT GRPC_PORT

Serves `minilm`: `input_ids` INT64 [n] a request to `embedding` FP32 [d], by ONNX Runtime on the same file, pooled by the mean and normalised,
batched by Triton: up to 32 requests, none waits longer than 5 ms for others.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

MAX_BATCH, MAX_DELAY_US = 32, 5_000


def main(path: str, http_port: str, grpc_port: str) -> None:
    """Serves until it is terminated."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    @batch  # type: ignore[untyped-decorator]
    def infer(input_ids: Any) -> dict[str, Any]:
        mask = np.ones_like(input_ids)
        given = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": np.zeros_like(input_ids)}
        found = session.run(None, {name: given[name] for name in names})[0]
        pooled = found.mean(axis=1) if found.ndim == 3 else found
        return {"embedding": pooled / np.linalg.norm(pooled, axis=1, keepdims=True)}

    with Triton(config=TritonConfig(http_port=int(http_port), grpc_port=int(grpc_port), allow_metrics=False)) as triton:
        triton.bind(
            "minilm",
            infer,
            inputs=[Tensor(name="input_ids", dtype=np.int64, shape=(-1,))],
            outputs=[Tensor(name="embedding", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(
                max_batch_size=MAX_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=MAX_DELAY_US)
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
