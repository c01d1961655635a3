"""A batch job that is done, and of whose lines some failed for a reason that may pass: those alone are asked again, and no answer is asked for twice.

Nothing here reads a clock, draws at random or does I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from decisions.jobs import Job, Numbers
from schemas.reasons import lookup

T = TypeVar("T")


def ranges_of(numbers: Iterable[int]) -> Numbers:
    """Numbers as ranges, each by its first and last: lines that fail together mostly follow one another."""
    found: Numbers = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def among(number: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether a number is in the ranges."""
    at = bisect_right(ranges, number, key=lambda span: span[0]) - 1
    return at >= 0 and number <= ranges[at][1]


def asked_again(job: Job, created_ms: int, seed: str, numbers: Sequence[int]) -> Job:
    """The job that asks these lines of a finished one again, under ids of its own. Their errors leave the output, and all else stays there."""
    kept_failed = job.failed - len(numbers)
    reasons = Counter({reason: count for reason, count in job.reasons.items() if not lookup(reason).retriable})
    return Job(
        created_ms, seed, job.input_digest, job.options, job.lines, job.served, done=job.done, failed=kept_failed, tenant=job.tenant, cluster=job.cluster,
        only=ranges_of(numbers), earlier=job.done + kept_failed,
        prompts=job.prompts, reasons=reasons,
    )  # fmt: skip


def in_order(
    numbers: Iterable[int], again: Sequence[tuple[int, int]], kept: Iterator[T], new: Iterator[T]
) -> Iterator[T]:
    """What stands for each number: of those in `again` what came last, of the others what was kept. Both are in order."""
    for number in numbers:
        yield next(new if among(number, again) else kept)
