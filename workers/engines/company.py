"""Whether a model's rows come out of a batch as they do alone: tried once, when it is loaded, on rows made up for it.

Some don't. A model quantised as it runs takes one scale for all rows, and one with few digits in its norms sums in another order. Rows of zeros and
ones, which nearly every vocabulary has, and of normal numbers tell of such a model; that another has no input on which it does the same, they can't.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import structlog

from schemas.events import TensorSpec
from schemas.tensors import ANY, elements
from workers.engines.arrays import DTYPES, Array
from workers.engines.onnx_session import Session
from workers.engines.port import EngineError

log = structlog.get_logger("onnx")

ROWS = 4
EXTENT = 8
"""Of a dimension that may be any."""
ELEMENTS_MAX = 200_000
"""Of a row: a model with larger ones isn't tried, whose runs may take more memory than its worker has for calls one by one."""
LIMIT_S = 10.0
"""For all runs; one that takes longer isn't tried to its end."""
TOLERANCE = 1e-5
"""What values of up to 1 may differ by, and larger ones in proportion to the largest. Of numbers with fewer digits it is two steps of theirs."""


def differs_in_company(session: Session) -> bool:
    """Blocks for six short runs. False as well where it can't be told, or a row by itself isn't the same twice.

    It can't of BYTES or BF16, of large rows, and where the runs fail or take too long.
    """
    inputs = session.file.inputs
    if any(spec.datatype in {"BYTES", "BF16"} for spec in (*inputs, *session.file.outputs)):
        return False
    if sum(elements(_row_shape(spec)) for spec in inputs) > ELEMENTS_MAX:
        return False
    feeds = _made_up(inputs)
    fetch, options = [spec.name for spec in session.file.outputs], session.options()
    timer = threading.Timer(LIMIT_S, lambda: setattr(options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        rows = [
            session.run({name: array[at : at + 1] for name, array in feeds.items()}, fetch, options)
            for at in range(ROWS)
        ]
        first_again = session.run({name: array[:1] for name, array in feeds.items()}, fetch, options)
        together = session.run(feeds, fetch, options)
    except EngineError as error:
        log.info("whether rows differ by what shares their batch can't be tried on made-up ones", error=str(error))
        return False
    finally:
        timer.cancel()
    if any(_differ(values, [again]) for values, again in zip(rows[0], first_again, strict=True)):
        return False
    return any(_differ(values, [row[index] for row in rows]) for index, values in enumerate(together))


def _row_shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(EXTENT if extent == ANY else extent for extent in spec.shape[1:])


def _made_up(inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """The same each time."""
    random, made = np.random.default_rng(0), {}
    for spec in inputs:
        shape, dtype = (ROWS, *_row_shape(spec)), np.dtype(DTYPES[spec.datatype])
        drawn = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        made[spec.name] = drawn.astype(dtype)
    return made


def _differ(together: Array, alone: Sequence[Array]) -> bool:
    """Whether rows have other values together than alone. False if there isn't a row for each: then they can't be told apart anyway."""
    if any(array.shape != (1, *together.shape[1:]) for array in alone) or len(together) != len(alone):
        return False
    single = np.concatenate(alone)
    if together.dtype.kind != "f":
        return not np.array_equal(together, single)
    tolerance = max(TOLERANCE, 2 * float(np.finfo(together.dtype).eps))
    finite = np.abs(single[np.isfinite(single)])
    largest = max(1.0, float(finite.max(initial=0.0)))
    return not np.allclose(together, single, rtol=0, atol=tolerance * largest, equal_nan=True)
