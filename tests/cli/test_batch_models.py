"""The models that a batch job's lines name: looked for before anything is asked, and pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.batch import Served
from cli.batch_files import check, read_lines
from cli.batch_lines import Asking
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from tests.cli.batch_jobs import EMBED, job_of, line, models, write

CHAT = ModelVersionRegistered("chat", "v1", "scripted", "", 4_096)


def prompt(custom_id: str, model: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "url": "/v1/completions", "body": {"model": model, "prompt": "hi"}}


async def test_a_line_whose_model_is_not_there_takes_no_prompt_or_is_not_served_to_batch_is_at_fault(
    tmp_path: Path,
) -> None:
    live = replace(CHAT, model="live", tiers=("interactive",))
    names = ("gone", EMBED.model, "live", CHAT.model)
    lines = [prompt(name, name) for name in names]
    source = write(tmp_path / "in.jsonl", *lines, line("quick", "quick"))
    quick = replace(EMBED, model="quick", tiers=("interactive",))
    served = Served(models(EMBED, CHAT, live, quick))
    assert (await check(source, Asking(served))).bad == 4
    faults = [each.fault for each in read_lines(source, Asking(served))]
    told = [None if fault is None else (fault.reason, fault.param) for fault in faults]
    nowhere = (Reason.MODEL_NOT_FOUND, "model")
    assert told == [nowhere, (Reason.INVALID_REQUEST, "model"), nowhere, None, nowhere]
    assert "takes tensors" in str(faults[1])
    assert "not served on the tier batch" in str(faults[2])
    assert list(served.found) == [EMBED.model, CHAT.model]


async def test_a_job_that_goes_on_asks_the_language_models_that_it_was_begun_with(tmp_path: Path) -> None:
    """Whatever was promoted or deployed meanwhile; one that an earlier build began looked for none, and asks all."""
    source = write(tmp_path / "in.jsonl", prompt("a", CHAT.model), prompt("b", "gone"))
    job = await job_of(source, Served(models(CHAT)))
    resumed = Served(models(CHAT, replace(CHAT, version="v2"), replace(CHAT, model="gone")))
    resumed.pin(job)
    assert [each.fault is None for each in read_lines(source, Asking(resumed))] == [True, False]
    job.served = {}
    resumed.pin(job)
    assert [each.fault is None for each in read_lines(source, Asking(resumed, prompts=False))] == [True, True]
