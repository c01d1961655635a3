"""Whether a model's version can be served now: a worker that has loaded it says so, and has said so lately.

It is what callers are told who ask before they send. No request is refused by it: one that comes without a ready worker waits for one, as far as its
deadline allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from decisions.placement import READY, STALE_MS, SeenWorker

NO_WORKER = "no worker is ready"
SILENT = "silent"


def why_not_ready(workers: Iterable[SeenWorker], now_ms: int, stale_ms: int = STALE_MS) -> str | None:
    """None if one of a version's workers is ready, on whatever tier; else the reason, which counts what the workers do instead.

    `workers` are those that serve the version, in any order and state. Reports older than `stale_ms` before `now_ms` are not believed.
    """
    states = Counter(seen.report.state if now_ms - seen.seen_ms <= stale_ms else SILENT for seen in workers)
    if states[READY]:
        return None
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if count)
    return f"{NO_WORKER} ({told})" if told else NO_WORKER
