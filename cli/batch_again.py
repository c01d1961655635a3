"""A batch job that is done, run once more: its lines that failed for a reason that may pass are asked again, and the answers that are there stay."""

from __future__ import annotations

import secrets
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from cli.batch_files import JobFiles, raw_lines
from decisions.job_again import asked_again, in_order
from decisions.jobs import Job
from schemas.errors import HeadraceError
from schemas.reasons import Reason, lookup

_ANSWER_ENDS = b'"error":null}\n'


def error_of(line: bytes) -> dict[str, Any] | None:
    """Of a line of an output that is an error, what it tells: `code` is its reason, `line` the number of the input's line."""
    if line.endswith(_ANSWER_ENDS):  # an answer may be large, and isn't parsed
        return None
    error: dict[str, Any] | None = orjson.loads(line)["error"]
    return error


def may_pass(line: bytes) -> int | None:
    """Of a line of an output that is an error which may pass, the number of the input's line."""
    error = error_of(line)
    return error["line"] if error is not None and lookup(error["code"]).retriable else None


def count_reasons(files: JobFiles, job: Job) -> None:
    """The reasons of a job's errors as its output has them, if it was kept by an earlier build, which didn't count them."""
    if job.reasons.total() != job.failed:
        job.reasons = Counter(error["code"] for line in files.lines(job) if (error := error_of(line)) is not None)


def begin_again(files: JobFiles, job: Job, now_ms: int) -> Job | None:
    """The job that asks what may pass of a finished one, noted, and its output without these errors; None if there are none.

    Raises HeadraceError: conflict if something else follows on the output; what `JobFiles.rewrite` raises.
    """
    if not job.may_pass:
        return None
    numbers = [number for line in files.lines(job) if (number := may_pass(line)) is not None]
    if not numbers:
        return None
    if not files.is_whole(job):
        text = f"something follows in {files.out} on what the job wrote, which asking again would cut off; put it elsewhere"
        raise HeadraceError(Reason.CONFLICT, text)
    again = asked_again(job, now_ms, secrets.token_hex(16), numbers)
    files.rewrite(again, (line for line in files.lines(job) if may_pass(line) is None))
    return again


def put_in_order(files: JobFiles, job: Job, source: Path) -> None:
    """What was asked again takes its place among the lines that were there, of a finished job whose output is in order otherwise."""
    if job.only is None:
        return
    kept, new = files.lines(job), islice(files.lines(job), job.earlier, None)
    ordered = in_order((number for number, _ in raw_lines(source)), job.only, kept, new)
    job.only, job.earlier = None, 0
    files.rewrite(job, ordered)
