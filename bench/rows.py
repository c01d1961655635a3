"""What a benchmark says: rows that set our figure beside a peer's, as a table for people or as one JSON list for scripts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from bench.load import percentile
from cli.context import console, print_json, table

DIGITS = 3
P50_P99 = (("p50", 0.5), ("p99", 0.99))


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        metric: what was measured, its unit last in the name.
        unit: such as `ms` or `tokens/s`.
        at: under which load, such as a concurrency.
        ours: Headrace's figure.
        peer: who is compared with.
        theirs: the peer's figure.
        ratio: ours / theirs; None where theirs is 0.
    """

    metric: str
    unit: str
    at: str
    ours: float
    peer: str
    theirs: float
    ratio: float | None


def row(metric: str, unit: str, at: object, ours: float, peer: str, theirs: float) -> Row:
    """A row with its ratio, rounded to a thousandth."""
    ratio = None if theirs == 0 else round(ours / theirs, DIGITS)
    return Row(metric, unit, str(at), round(ours, DIGITS), peer, round(theirs, DIGITS), ratio)


def quantile_rows(
    metric: str,
    at: object,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    quantiles: Iterable[tuple[str, float]] = P50_P99,
) -> list[Row]:
    """A row of milliseconds for each quantile, `metric_p50_ms` and so on."""
    return [
        row(f"{metric}_{name}_ms", "ms", at, percentile(ours, q), peer, percentile(theirs, q)) for name, q in quantiles
    ]


def tell_worst(rows: Sequence[Row], aim_ms: float) -> None:
    """Says on standard error whether our largest figure is within an aim for the p99."""
    worst_ms = max(each.ours for each in rows)
    verdict = "met" if worst_ms <= aim_ms else "missed"
    console(stderr=True).print(f"aim: p99 within {aim_ms:.0f} ms: {verdict} ({worst_ms:.1f} ms)")


def tell_aim(told: Row, aim: float) -> None:
    """Says on standard error whether our figure of a row is within an aim, and what the peer's is."""
    verdict = "met" if told.ours <= aim else "missed"
    console(stderr=True).print(
        f"aim: {told.metric} within {aim:g} {told.unit}: {verdict} ({told.ours:.2f}; {told.peer}: {told.theirs:.2f})"
    )


def show(rows: Sequence[Row], *, as_json: bool, title: str) -> None:
    """Prints the rows on standard output: as JSON one list and nothing else."""
    if as_json:
        print_json([asdict(item) for item in rows])
        return
    shown = table("metric", ">at", ">ours", ">theirs", ">ratio", "unit", "peer", title=title)
    for item in rows:
        ratio = "" if item.ratio is None else f"{item.ratio:.3f}"
        shown.add_row(item.metric, item.at, f"{item.ours:.2f}", f"{item.theirs:.2f}", ratio, item.unit, item.peer)
    console().print(shown)


def conditions() -> str:
    """What a reader must know of the machine: its cores, and its load average over a minute before the run."""
    return f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.2f}"
