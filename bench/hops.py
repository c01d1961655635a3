"""Where a request's time went, read back from the log.

The broker stamps each record when it appends it, in whole milliseconds: between two stamps the rounding cancels in the mean, and where
a stamp meets the caller's own clock, half a millisecond is added back. All of it must run on one machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from bench.load import Sample, now_s
from infra.log import EventDecoder
from infra.read import Positions, read_to_end
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, InferenceScheduled, TokensGenerated
from schemas.reasons import Reason
from schemas.topics import INTERACTIVE, TOKENS, requests_topic

HOPS = (
    "caller → front door → requests",
    "admission: requests → work",
    "worker and engine: work → tokens",
    "tokens → front door → caller",
)
STAMP_BIAS_MS = 0.5
ID_CHARS = 36
_STEPS = (InferenceRequested, InferenceScheduled, TokensGenerated)


class Hops:
    """Reads a load's records: `begin` before it, `mean_ms` after it."""

    def __init__(self, settings: KafkaSettings, work: Iterable[str] = ()) -> None:
        """`work` names the work topics that the load goes to."""
        self._settings = settings
        self._topics = (requests_topic(INTERACTIVE), *work, TOKENS)
        self._positions: dict[str, Positions] = {}
        self._set_s = 0.0

    async def begin(self) -> None:
        """Skips what is there already, and notes how far the machine's clock was set since the caller's own began."""
        self._set_s = time.time() - now_s()
        for topic in self._topics:
            async for _ in read_to_end(self._settings, topic, self._positions.setdefault(topic, {})):
                pass

    async def mean_ms(self, samples: Sequence[Sample]) -> tuple[float, ...]:
        """The mean time of each of `HOPS` over the calls. Raises HeadraceError (not_found) if the log lacks one of them."""
        stamps: dict[str, dict[type[object], int]] = {sample.request_id[-ID_CHARS:]: {} for sample in samples}
        decoder = EventDecoder(self._settings)
        for topic in self._topics:
            async for record in read_to_end(self._settings, topic, self._positions.setdefault(topic, {})):
                event = await decoder.decode(record.value)
                if isinstance(event, _STEPS) and (own := stamps.get(event.request_id)) is not None:
                    own.setdefault(type(event), record.timestamp)
        return _means([_hops(sample, stamps[sample.request_id[-ID_CHARS:]], self._set_s) for sample in samples])


def _hops(sample: Sample, stamps: dict[type[object], int], set_s: float) -> tuple[float, ...]:
    if missing := [step.__name__ for step in _STEPS if step not in stamps]:
        raise HeadraceError(Reason.NOT_FOUND, f"the log holds no {missing[0]} of request {sample.request_id}")
    assert sample.first_s is not None
    at_ms = [
        (sample.sent_s + set_s) * 1000,
        *(stamps[step] + STAMP_BIAS_MS for step in _STEPS),
        (sample.first_s + set_s) * 1000,
    ]
    return tuple(later - earlier for earlier, later in itertools.pairwise(at_ms))


def _means(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
