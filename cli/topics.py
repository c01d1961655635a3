"""`headrace topics`: make the log match the design, list it, follow it, and print who may write where."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cli.context import console, kafka_settings, print_json, run_async, table

if TYPE_CHECKING:
    from infra.settings import KafkaSettings

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")
_START = re.compile(r"beginning|end|-\d{1,9}")


_FOR_A_NEW_LOG = "For a new log: one that is there keeps its own."


@click.group()
def topics() -> None:
    """Create, list and follow the log's topics."""


@topics.command()
@click.option(
    "--replication", type=click.IntRange(1), default=1, show_default=True, help="Replicas of each new partition."
)
@click.option("--requests", type=click.IntRange(1), help=f"Partitions of what is keyed by tenant. {_FOR_A_NEW_LOG}")
@click.option("--tokens", type=click.IntRange(1), help=f"Partitions of `tokens`. {_FOR_A_NEW_LOG}")
@click.option("--answers", type=click.IntRange(1), help=f"Partitions of `answers`. {_FOR_A_NEW_LOG}")
@JSON
def ensure(replication: int, requests: int | None, tokens: int | None, answers: int | None, as_json: bool) -> None:
    """Create what is missing, set what differs, and say what can't be put right.

    `--requests` is also how many admission processes of a tier can share its requests, and `--tokens` how many `endings` can.
    """
    from cli.registry import ensure_all

    given = {"requests": requests, "tokens": tokens, "answers": answers}
    partitions = {kind: count for kind, count in given.items() if count is not None}
    reports = run_async(ensure_all(kafka_settings(), replication, partitions))
    if as_json:
        for report in reports:
            print_json(report)
        return
    shown = table("topic", ">partitions", "what was done")
    for report in reports:
        shown.add_row(report["topic"], str(report["partitions"]), report["done"])
    console().print(shown)


@topics.command("list")
@JSON
def list_(as_json: bool) -> None:
    """Every topic, with its partitions and how many records it holds."""
    rows = run_async(_list(kafka_settings()))
    if as_json:
        for row in rows:
            print_json(row)
        return
    shown = table("topic", ">partitions", ">records", ">written")
    for row in rows:
        shown.add_row(str(row["topic"]), str(row["partitions"]), str(row["records"]), str(row["written"]))
    console().print(shown)


async def _list(settings: KafkaSettings) -> list[dict[str, object]]:
    """`records`: what is there; `written`: what ever was."""
    from cli.records import partitions_of
    from infra.kafka import make_consumer

    consumer = make_consumer(settings)
    try:
        await consumer.start()
        names = sorted(name for name in await consumer.topics() if not name.startswith("__"))
        partitions = await partitions_of(consumer, names)
        begins, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
    finally:
        await consumer.stop()
    rows = []
    for name in names:
        own = [partition for partition in partitions if partition.topic == name]
        written = sum(ends[p] for p in own)
        rows.append(
            {
                "topic": name,
                "partitions": len(own),
                "records": written - sum(begins[p] for p in own),
                "written": written,
            }
        )
    return rows


def _check_start(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not _START.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is neither beginning, end, nor -N for N records before the end of each partition"
        )
    return value


@topics.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    default="end",
    callback=_check_start,
    help="beginning, end (default), or -N: N records before each partition's end.",
)
@click.option("--limit", type=click.IntRange(1), help="Stop after so many records.")
@click.option("--follow/--no-follow", "forever", default=True, help="Wait for more at the end, or stop there.")
@JSON
def tail(topic: str, start: str, limit: int | None, forever: bool, as_json: bool) -> None:
    """Print TOPIC's events, decoded, as they come."""
    with contextlib.suppress(KeyboardInterrupt):
        run_async(_tail(kafka_settings(), topic, start, limit, forever, as_json))


async def _tail(
    settings: KafkaSettings, topic: str, start: str, limit: int | None, forever: bool, as_json: bool
) -> None:
    from rich.text import Text

    from cli.records import follow, shown

    out = console()
    async for record in follow(settings, topic, start=start, limit=limit, forever=forever):
        if as_json:
            print_json(record.as_json())
            continue
        at = datetime.fromtimestamp(record.timestamp_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
        key = "-" if record.key is None else record.key.decode("utf-8", "backslashreplace")
        line = Text(f"{at} {record.partition}:{record.offset} ", style="dim")
        line.append(f"{key} ")
        line.append(record.name, style="bold red" if record.event is None else "bold")
        line.append(f" {shown(record)}")
        out.print(line)


@topics.command()
@click.option("--tenant", "tenants", multiple=True, help="Also for this tenant's direct producer (repeatable).")
@click.option("--bootstrap", help="The cluster in the printed commands (default: the one in use).")
@click.option("--command-config", metavar="FILE", help="The tool's properties: how an administrator signs in.")
@JSON
def acl(tenants: tuple[str, ...], bootstrap: str | None, command_config: str | None, as_json: bool) -> None:
    """Print the commands that let each role do what it needs, and no more."""
    from cli.acl import commands, role_commands, roles

    cluster = bootstrap or kafka_settings().bootstrap
    if as_json:
        for role in list(roles(tenants)):
            lines = list(role_commands(role, cluster, command_config))
            print_json({"role": role.name, "why": role.why, "principal": role.principal, "commands": lines})
        return
    for line in list(commands(cluster, tenants, command_config)):  # all of them, or the error alone
        click.echo(line)
