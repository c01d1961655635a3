from __future__ import annotations

import pytest

from infra.onnx_args import BUCKETS, OnnxArgs, parse_args
from schemas.errors import HeadraceError


def test_defaults_suit_any_model() -> None:
    assert parse_args({}) == OnnxArgs(max_batch_size=32, max_queue_delay_ms=0, instances=None, buckets=BUCKETS)
    assert parse_args({}).max_run_ms == 60_000
    assert parse_args({}, "bytes-classification").max_batch_size == 1
    assert parse_args({"max_batch_size": 4}, "bytes-classification").max_batch_size == 4


def test_what_is_given_is_taken() -> None:
    given = {
        "max_batch_size": 8,
        "max_queue_delay_ms": 2.5,
        "preferred_batch_sizes": [8, 4, 4],
        "max_run_ms": 1500,
        "instances": 2,
        "intra_op_threads": 3,
        "buckets": [128, 16],
        "pooling": "cls",
        "normalize": False,
    }
    assert parse_args(given, "text-embedding") == OnnxArgs(8, 2.5, (4, 8), 1_500, 2, 3, (16, 128), "cls", False)


@pytest.mark.parametrize(
    ("given", "processor", "told"),
    [
        ({"max_batch": 4}, "", "max_batch is unknown; the engine onnx takes max_batch_size, max_queue_delay_ms"),
        ({"max_batch_size": 0}, "", "max_batch_size must be a whole number from 1"),
        ({"max_batch_size": True}, "", "max_batch_size must be a whole number"),
        ({"max_queue_delay_ms": -1}, "", "max_queue_delay_ms must be a number from 0"),
        ({"max_queue_delay_ms": float("nan")}, "", "max_queue_delay_ms must be a number from 0"),
        ({"max_run_ms": 0}, "", "max_run_ms must be a number from 1 to 3600000, not 0"),
        ({"max_run_ms": 3_600_001}, "", "max_run_ms must be a number from 1 to 3600000"),
        ({"max_run_ms": None}, "", "max_run_ms must be a number"),
        ({"preferred_batch_sizes": 4}, "", "preferred_batch_sizes must be a list"),
        ({"preferred_batch_sizes": [0]}, "", "preferred_batch_sizes must be a whole number from 1"),
        (
            {"preferred_batch_sizes": [2, 8], "max_batch_size": 4},
            "",
            "preferred_batch_sizes has 8, and max_batch_size is 4",
        ),
        (
            {"preferred_batch_sizes": [8]},
            "bytes-classification",
            "preferred_batch_sizes has 8, and max_batch_size is 1",
        ),
        ({"instances": "2"}, "", "instances must be a whole number"),
        ({"buckets": [8]}, "", "buckets is only for the processor text-embedding or text-classification"),
        ({"pooling": "cls"}, "text-classification", "pooling is only for the processor text-embedding"),
        ({"pooling": "splade"}, "text-embedding", "pooling must be one of mean, cls, max, last, not 'splade'"),
        ({"normalize": 1}, "text-embedding", "normalize must be true or false, not 1"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], processor: str, told: str) -> None:
    with pytest.raises(HeadraceError) as refused:
        parse_args(given, processor)
    key = next(iter(given))
    assert refused.value.param == f"engine_args.{key}"
    assert refused.value.message.startswith(f"engine_args.{told}")
