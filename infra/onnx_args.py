"""What `engine_args` a model of the engine `onnx` takes: checked when a models file is read, and again by the worker that loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import HeadraceError
from schemas.events import TensorSpec
from schemas.processors import BYTES_CLASSIFICATION, EMBEDDING, TEXT_PROCESSORS
from schemas.reasons import Reason

BATCH_MAX = 4_096
DELAY_MS_MAX = 60_000
RUN_MS_MAX = 3_600_000
INSTANCES_MAX = 64
THREADS_MAX = 256
LIST_MAX = 64
LENGTH_MAX = 1_000_000
MEAN, CLS, MAX, LAST = POOLINGS = ("mean", "cls", "max", "last")
POOLED_RANK = 2
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


@dataclass(frozen=True, slots=True)
class OnnxArgs:
    """How a model is run.

    Attributes:
        max_batch_size: rows that run at once, at most; 1 batches nothing. For `bytes-classification` it is 1 by default: Magika's model is no
            faster in batches, and its scores then differ, for want of digits in its norms: of a file of 16 characters by up to 0.1. Where nothing
            is said, a model whose rows are seen to differ by what shares their batch has 1, too (`workers.engines.company`).
        max_queue_delay_ms: how long a request waits for company while an instance is idle. None by default: batches form of what comes while
            the instances are busy, so under load waiting gains nothing, and without load it only adds to the time.
        preferred_batch_sizes: rows with which a batch goes before that delay.
        max_run_ms: how long one run of the model may last. Then it is ended, the request that was alone in it fails as `time_limit_exceeded`, and
            the instance serves the next; those who shared it run again one by one. It bounds for how long requests that never end keep a
            worker; a model whose honest runs may be as long needs more, or a smaller `max_batch_size`.
        instances: how many runs at once. None is two, or one on a single core: while one's rows are told and the next are gathered the other
            runs, and threads of one run that wait for each other lose more to what else the cores do than two runs side by side.
        intra_op_threads: threads of a run; None shares the machine's cores among the instances.
        buckets: lengths in tokens; texts between two of them run together, padded to the longest. Text processors only.
        pooling: what becomes a text's vector: the mean of its tokens' (by default), its first token's (`cls`), the largest of its tokens' in each dimension
            (`max`), or its last token's (`last`). Embeddings only, and no model that pools by itself.
        normalize: whether vectors are brought to length 1. Embeddings only.
    """

    max_batch_size: int = 32
    max_queue_delay_ms: float = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    max_run_ms: float = 60_000
    instances: int | None = None
    intra_op_threads: int | None = None
    buckets: tuple[int, ...] = BUCKETS
    pooling: str = MEAN
    normalize: bool = True


def parse_args(given: Mapping[str, Any], processor: str = "") -> OnnxArgs:
    """Checks them for a processor. Raises HeadraceError (invalid_request) whose `param` names the key and whose text says what it takes."""
    known = [key for key in _KEYS if key not in _ONLY or processor in _ONLY[key]]
    for key in sorted(given):
        if key not in _KEYS:
            raise _refuse(key, f"is unknown; the engine onnx takes {', '.join(known)}")
        if key not in known:
            raise _refuse(key, f"is only for the processor {' or '.join(_ONLY[key])}")
    values = {key: _KEYS[key](key, value) for key, value in given.items()}
    if processor == BYTES_CLASSIFICATION:
        values.setdefault("max_batch_size", 1)
    args = OnnxArgs(**values)
    if (largest := max(args.preferred_batch_sizes, default=0)) > args.max_batch_size:
        raise _refuse(
            "preferred_batch_sizes",
            f"has {largest}, and max_batch_size is {args.max_batch_size}: no batch has so many rows",
        )
    return args


def check_pooling(given: Mapping[str, Any], output: TensorSpec) -> None:
    """Raises HeadraceError (invalid_request) if `pooling` is said of a model whose output is pooled: a vector a text, and none of its tokens'."""
    if "pooling" in given and len(output.shape) == POOLED_RANK:
        text = f"is {given['pooling']}, but the file pools by itself: `{output.name}` is a vector a text; leave pooling out"
        raise _refuse("pooling", text)


def _refuse(key: str, problem: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, f"engine_args.{key} {problem}", param=f"engine_args.{key}")


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def convert(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refuse(key, f"must be a whole number from {low} to {high}, not {value!r}")
        return value

    return convert


def _integers(low: int, high: int) -> Callable[[str, Any], tuple[int, ...]]:
    one = _integer(low, high)

    def convert(key: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > LIST_MAX:
            raise _refuse(key, f"must be a list of at most {LIST_MAX} whole numbers, not {value!r}")
        return tuple(sorted({one(key, item) for item in value}))

    return convert


def _number(low: int, high: int) -> Callable[[str, Any], float]:
    def convert(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _refuse(key, f"must be a number from {low} to {high}, not {value!r}")
        return float(value)

    return convert


def _pooling(key: str, value: Any) -> str:
    if value not in POOLINGS:
        raise _refuse(key, f"must be one of {', '.join(POOLINGS)}, not {value!r}")
    return str(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(key, f"must be true or false, not {value!r}")
    return value


_KEYS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_batch_size": _integer(1, BATCH_MAX),
    "max_queue_delay_ms": _number(0, DELAY_MS_MAX),
    "preferred_batch_sizes": _integers(1, BATCH_MAX),
    "max_run_ms": _number(1, RUN_MS_MAX),
    "instances": _integer(1, INSTANCES_MAX),
    "intra_op_threads": _integer(1, THREADS_MAX),
    "buckets": _integers(1, LENGTH_MAX),
    "pooling": _pooling,
    "normalize": _flag,
}
_ONLY = {"buckets": TEXT_PROCESSORS, "pooling": (EMBEDDING,), "normalize": (EMBEDDING,)}
