"""Batch jobs, their lines and their files, for tests: without a log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cli.batch import Served
from cli.batch_files import JobFiles, check, read_lines
from cli.batch_flights import Flight
from cli.batch_lines import Asking
from cli.batch_run import Runner
from cli.registry import Models
from decisions.jobs import Job
from infra.payloads import Payloads
from infra.settings import KafkaSettings
from schemas.events import InferenceAnswered, ModelVersionRegistered, Usage
from tests.small_models import small_versions

EMBED, CLASSIFY, BYTES = small_versions("batch")


def models(*versions: ModelVersionRegistered) -> Models:
    found = Models()
    for version in versions:
        found.versions[version.model, version.version] = version
        found.stable[version.model] = version.version
    return found


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def line(custom_id: str, model: str) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": model, "input": custom_id},
    }


async def job_of(source: Path, served: Served, model: str | None = None) -> Job:
    checked = await check(source, Asking(served, model))
    return Job(1_700_000_000_000, "seed", checked.digest, {}, checked.lines, served.found)


def runner_of(job: Job, out: Path, payloads: Payloads | None = None) -> Runner:
    granted: Any = SimpleNamespace(tenant="acme")
    return Runner(job, JobFiles(out), KafkaSettings(), granted, payloads, ordered=True)


def asked(
    tmp_path: Path, *texts: str, payloads: Payloads | None = None
) -> tuple[Runner, Flight, Callable[..., InferenceAnswered]]:
    """A run of a job that goes on, its one unit, and errors in answer to it."""
    source = write(tmp_path / "in.jsonl", *({"text": text} for text in texts))
    asking = Asking(Served(models(EMBED)), EMBED.model)
    job = Job(1_700_000_000_000, "seed", "", {}, len(texts), asked=1)
    runner = runner_of(job, tmp_path / "out.jsonl", payloads)
    flight = runner._register(0, list(read_lines(source, asking)))

    def error(reason: str, part: int = 0) -> InferenceAnswered:
        return InferenceAnswered(job.id_of(0, part), "", EMBED.model, "v1", "batch", (), Usage(0, 0), reason, "so")

    return runner, flight, error


def goes_on(files: JobFiles) -> Job:
    """The next run's beginning."""
    files.open()
    try:
        job = files.load()
        assert job is not None
        files.begin(job)
        return job
    finally:
        files.close()
