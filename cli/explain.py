"""`headrace explain REQUEST_ID`: what happened to one request, read back from the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cli.context import console, kafka_settings, print_json, run_async, table
from schemas.errors import HeadraceError
from schemas.reasons import Reason

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cli.timeline import Step, Timeline
    from infra.settings import KafkaSettings

LABELS = {
    "admission": "admission",
    "queue": "queue",
    "prefill": "prefill (to the first token)",
    "decode": "decode",
    "first_token": "first token after",
    "total": "total",
}


@click.command()
@click.argument("request_id")
@click.option("--all", "whole", is_flag=True, help="Show every token chunk.")
@click.option("--everything", is_flag=True, help="Search the whole log, not only from the time in the id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(request_id: str, whole: bool, everything: bool, as_json: bool) -> None:
    """Tell what happened to a request: every decision, event and offset, and the time between.

    REQUEST_ID is the header x-request-id, or an answer's id with or without its `chatcmpl-`.
    """
    timeline = run_async(read_timeline(kafka_settings(), request_id, everything=everything))
    if as_json:
        print_json(timeline.as_json())
    else:
        show(timeline, console(), whole=whole)


async def read_timeline(settings: KafkaSettings, text: str, *, everything: bool = False) -> Timeline:
    """A request's timeline. Raises HeadraceError (not_found) if the log holds nothing of it."""
    from cli.history import history, request_id_of
    from cli.timeline import build

    request_id = request_id_of(text)
    records = await history(settings, request_id, everything=everything)
    if not records:
        hint = "" if everything else "; if the clock that made the id was wrong, --everything searches the whole log"
        raise HeadraceError(
            Reason.NOT_FOUND,
            f"the log at {settings.bootstrap} holds nothing of {request_id} (it may be past its retention{hint})",
        )
    return build(request_id, records)


def show(timeline: Timeline, out: Console, *, whole: bool = False) -> None:
    """Prints a timeline for a person."""
    facts = timeline.facts
    out.print(
        f"[bold]{timeline.request_id}[/] {facts['tenant']} → {facts['model']} version {facts['version']}, {facts['tier']}"
    )
    why = f": {facts['reason']}, {facts['message']}" if facts["reason"] else ""
    out.print(f"[bold]{facts['outcome']}[/]{why}", markup=True)
    out.print(event_table(timeline, whole=whole))
    for step in timeline.steps:
        if step.decisions:
            out.print(_decisions(step))
    out.print(_sums(timeline))


def event_table(timeline: Timeline, *, whole: bool = False) -> Table:
    """The events a request left in the log, in order."""
    from rich.text import Text

    from cli.timeline import runs

    shown = table(">+ms", "topic", ">partition", ">offset", "event", "what it says")
    for item in timeline.steps if whole else runs(timeline.steps):
        if isinstance(item, list):
            first, last = item[0].read, item[-1].read
            offsets = f"{first.offset}-{last.offset}"
            shown.add_row(
                f"…{item[-1].plus_ms}",
                first.topic,
                str(first.partition),
                offsets,
                first.name,
                f"{len(item)} more chunks",
                style="dim",
            )
            continue
        read = item.read
        detail = Text(item.detail + (" (ignored by the fold)" if item.counted is False else ""))
        style = "dim" if item.counted is False else "bold red" if read.event is None else ""
        shown.add_row(
            str(item.plus_ms), read.topic, str(read.partition), str(read.offset), read.name, detail, style=style
        )
    return shown


def _decisions(step: Step) -> Table:
    from rich.text import Text

    shown = table(
        "check",
        "outcome",
        "on what grounds",
        title=f"Decisions of admission ({step.read.name}, offset {step.read.offset})",
    )
    for decision in step.decisions:
        shown.add_row(decision.check, decision.outcome, Text(decision.detail))
    return shown


def _sums(timeline: Timeline) -> Table:
    shown = table("phase", ">ms")
    for name, label in LABELS.items():
        duration = timeline.durations_ms[name]
        shown.add_row(label, "-" if duration is None else str(duration))
    tokens = timeline.tokens
    rate = f", {tokens['per_second']} a second" if tokens["per_second"] else ""
    cached = f" ({tokens['cached']} cached)" if tokens["cached"] else ""
    shown.add_row(
        "tokens",
        f"{tokens['prompt'] if tokens['prompt'] is not None else '-'}{cached} in, {tokens['completion']} out{rate}",
    )
    return shown
