"""`headrace status`: what runs on a data directory, as `up.json` and the machine have it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cli.context import console, data_dir, print_json, read_addresses, table


def report(directory: Path) -> list[dict[str, Any]]:
    """The processes of a `headrace up` that live: name, pid, state, uptime in seconds, memory in bytes. Empty if none does."""
    import psutil

    from infra.up_file import ProcessId

    try:
        state = json.loads((directory / "up.json").read_text())
        known = [ProcessId(**item) for item in (state["supervisor"], *state["children"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    rows = []
    for item in known:
        if not item.alive():
            continue
        process = psutil.Process(item.pid)
        with process.oneshot():
            uptime_s = round(time.time() - item.started_at_s, 1)
            rows.append(
                {
                    "name": item.name,
                    "pid": item.pid,
                    "state": process.status(),
                    "uptime_s": uptime_s,
                    "memory_bytes": process.memory_info().rss,
                }
            )
    return rows


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(as_json: bool) -> int:
    """What `headrace up` runs on this data directory. Exit status 1 if nothing."""
    found = report(data_dir())
    addresses = read_addresses(data_dir())
    if as_json:
        print_json(
            {"running": bool(found), "processes": found, "addresses": None if addresses is None else asdict(addresses)}
        )
        return 0 if found else 1
    if not found:
        console().print(f"Nothing runs on {data_dir()}: `headrace up` starts everything.")
        return 1
    shown = table("process", ">pid", ">up for", ">memory", "state")
    for row in found:
        shown.add_row(
            row["name"],
            str(row["pid"]),
            f"{row['uptime_s']:.0f} s",
            f"{row['memory_bytes'] / 1e6:.0f} MB",
            row["state"],
        )
    console().print(shown)
    if addresses is not None:
        console().print(f"front door {addresses.url}, Kafka {addresses.kafka}")
    else:
        console().print("It is still starting, or stopping.")
    return 0
