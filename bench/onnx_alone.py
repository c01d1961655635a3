"""The model's own speed, for `batching`: ONNX Runtime on a file, as many runs at once as there are cores, nothing else.

    python -m bench.onnx_alone MODEL.onnx ROWS TOKENS

For each line on its standard input, a number of seconds, it runs batches for so long and prints the rows a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np
import onnxruntime

THREADS_EACH = 1


def main(path: str, rows: str, tokens: str) -> None:
    """Serves until its standard input ends."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS_EACH
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(1).integers(1_000, 20_000, (int(rows), int(tokens)))
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    feeds = {node.name: given[node.name] for node in session.get_inputs()}
    for line in sys.stdin:
        print(_rate(session, feeds, int(rows), float(line)), flush=True)


def _rate(session: Any, feeds: dict[str, Any], rows: int, seconds: float) -> float:
    """Rows a second of all threads; a run that has begun is counted, and its time, too."""
    rates: list[float] = []

    def work() -> None:
        began_s, count = time.monotonic(), 0
        while (taken_s := time.monotonic() - began_s) < seconds:
            session.run(None, feeds)
            count += rows
        rates.append(count / taken_s)

    threads = [threading.Thread(target=work) for _ in os.sched_getaffinity(0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


if __name__ == "__main__":
    main(*sys.argv[1:])
