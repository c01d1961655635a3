"""What each process counts and times, served at /metrics.

Labels stay few: model, version, tier, and reasons from the closed list. Tenants and request ids are never labels, for
their number has no limit; they are in the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from schemas.topics import TOKENS as TOKENS_TOPIC


class _Timings(Histogram):
    """A histogram that one thread observes and reads. `Histogram` takes a lock and looks through all buckets for each value."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._counts = [0] * len(self._upper_bounds)
        self._total = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:  # noqa: ARG002
        """As `Histogram`'s, but for exemplars, which nobody asks for."""
        self._counts[bisect_left(self._upper_bounds, amount)] += 1
        self._total += amount

    def _child_samples(self) -> Iterable[Sample]:
        for value, count in zip([self._sum, *self._buckets], [self._total, *self._counts], strict=True):
            value.set(count)
        return super()._child_samples()


Labelled = TypeVar("Labelled", Counter, Gauge, Histogram)

_TRAFFIC = ("model", "version", "tier")

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_WAIT_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
_MODEL_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_CHECK_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)

TTFT_SECONDS = Histogram(
    "headrace_ttft_seconds",
    "From the request's arrival to the first token sent to the caller.",
    _TRAFFIC,
    buckets=_TTFT_BUCKETS_S,
)
BATCH_ROWS = Histogram(
    "headrace_batch_rows",
    "Of a tensor model's request: the rows of the run that it was part of.",
    ("model", "version"),
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
ITL_SECONDS = Histogram(
    "headrace_itl_seconds",
    "Between two token chunks of one answer, over the tokens in the later one.",
    _TRAFFIC,
    buckets=_ITL_BUCKETS_S,
)
QUEUE_SECONDS = Histogram(
    "headrace_queue_seconds",
    "From the work record's timestamp to the start of generation.",
    _TRAFFIC,
    buckets=_WAIT_BUCKETS_S,
)
MODEL_SECONDS = Histogram(
    "headrace_model_seconds",
    "From the start of generation to its end, in the engine.",
    _TRAFFIC,
    buckets=_MODEL_BUCKETS_S,
)
TOKENS = Counter(
    "headrace_tokens",  # Shown as headrace_tokens_total.
    "Tokens by kind: prompt, cached_prompt, output.",
    (*_TRAFFIC, "kind"),
)
HELD_BACK = Gauge("headrace_held_back", "Requests that wait in admission for their tenant's turn.", ("tier",))
PARKED = Gauge(
    "headrace_parked",
    "Requests that wait in admission for their tenant's turn, and are kept in the log alone.",
    ("tier",),
)
SLOTS = Gauge("headrace_slots", "Requests that the worker can run at once.", ("model", "version"))
SLOTS_USED = Gauge("headrace_slots_used", "Requests that the worker runs now.", _TRAFFIC)
REQUESTS = Counter(
    "headrace_requests",  # Shown as headrace_requests_total.
    "Requests that ended, as this process saw it, by outcome: completed, or the reason from the closed list.",
    (*_TRAFFIC, "outcome"),
)
SLOTS_TAKEN_OVER = Counter(
    "headrace_slots_taken_over",  # Shown as headrace_slots_taken_over_total.
    "Requests that were ended since their front door was gone and their tenant's next needed the slot.",
    ("tier",),
)
JOINED = Counter(
    "headrace_requests_joined",  # Shown as headrace_requests_joined_total.
    "Requests that were asked before, under the same key or id: the first's stream is their answer.",
    ("tier",),
)
ADMISSION_SECONDS = _Timings(
    "headrace_admission_seconds", "One admission check of one request.", ("check",), buckets=_CHECK_BUCKETS_S
)
STREAM_SLOW_READER = Counter(
    "headrace_stream_slow_reader",  # Shown as headrace_stream_slow_reader_total.
    "Connections closed because their reader fell behind the limit.",
    ("protocol",),
)
STREAMS_OPEN = Gauge("headrace_streams_open", "Answers that callers of this process wait for.", ("protocol",))
RESUMES = Counter(
    "headrace_resumes",  # Shown as headrace_resumes_total.
    "Streams taken up again by their callers, by how that ended: completed, or the reason from the closed list.",
    ("outcome",),
)
RECORDS = Counter(
    "headrace_records",  # Shown as headrace_records_total.
    "Records that admission and endings took, by topic.",
    ("topic",),
)
DEAD_LETTERS = Counter(
    "headrace_dead_letters",  # Shown as headrace_dead_letters_total.
    "Records put aside in dead-letters, by the topic they stood in.",
    ("topic", "reason"),
)
PASSED_OVER = Counter(
    "headrace_records_passed_over",  # Shown as headrace_records_passed_over_total.
    "Records of topics read into memory that this process can't read.",
    ("topic",),
)
ENDED_BY_CLOCK = Counter(
    "headrace_ended_by_clock",  # Shown as headrace_ended_by_clock_total.
    "Endings written because a deadline or a time limit had passed; those of requests that began meanwhile don't count.",
    ("reason",),
)
PAYLOADS = Counter(
    "headrace_payloads",  # Shown as headrace_payloads_total.
    "Events too large for a record: stored, read, swept; payload_lost and unavailable are those that couldn't be read.",
    ("outcome",),
)
CACHE_LOOKUPS = Counter(
    "headrace_cache_lookups",  # Shown as headrace_cache_lookups_total.
    "Requests for models with a response cache, by what came of it: hit, miss, passed over.",
    ("model", "outcome"),
)
CACHE_BYTES = Gauge("headrace_cache_bytes", "Answers that the response cache keeps of a model, in bytes.", ("model",))
SHARED_GENERATIONS = Counter(
    "headrace_shared_generations",  # Shown as headrace_shared_generations_total.
    "Answers that had the generation of an equal request.",
)
LOOP_LAG_SECONDS = Gauge("headrace_loop_lag_seconds", "By how much the event loop's last heartbeat was late.")
OPEN_REQUESTS_DROPPED = Counter(
    "headrace_open_requests_dropped",  # Shown as headrace_open_requests_dropped_total.
    "Requests that endings stopped following before they ended, by which limit: age, number.",
    ("limit",),
)


@cache
def of(metric: Labelled, *labels: str) -> Labelled:
    """`metric.labels(*labels)`, looked up once: where it is asked for each record, that costs more than to count."""
    return metric.labels(*labels)


def topic_label(topic: str) -> str:
    """A topic as a label: the tenants' own `tokens` topics are one with it."""
    return TOKENS_TOPIC if topic.startswith(f"{TOKENS_TOPIC}.") else topic
