"""Keeps `schemas/avro/` true to the events, and refuses a schema that can't read what the last release wrote.

Run `python -m schemas.files write` after changing an event, `check` in CI, and `release` when a version is released: it records what that
version writes under `schemas/avro/released/`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from avro.schema import Schema as AvroSchema
from avro.schema import parse as parse_avro

from schemas.codec import Schema, own_schemas

FOLDER = Path(__file__).parent / "avro"
RELEASED = FOLDER / "released"


def _text(schema: Schema) -> str:
    return json.dumps(schema, indent=2) + "\n"


def write(folder: Path = FOLDER) -> None:
    """Writes one `.avsc` an event, and removes those of events that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.avsc"):
        stale.unlink()
    for name, schema in own_schemas().items():
        (folder / f"{name}.avsc").write_text(_text(schema))


def stale(folder: Path = FOLDER) -> list[str]:
    """The events whose file differs from their schema, is missing, or is left over; empty if all is well."""
    expected = {name: _text(schema) for name, schema in own_schemas().items()}
    found = {path.stem: path.read_text() for path in folder.glob("*.avsc")}
    return sorted(name for name in expected | found if expected.get(name) != found.get(name))


def incompatibilities(reader: Schema, writer: Schema) -> list[str]:
    """Why records of `writer` can't be read by `reader`; empty if they can."""
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    verdict = checker.get_compatibility(_parsed(reader), _parsed(writer))
    if verdict.compatibility is SchemaCompatibilityType.compatible:
        return []
    return sorted(f"{place}: {why}" for place, why in zip(verdict.locations, verdict.messages, strict=False)) or [
        "incompatible"
    ]


def _parsed(schema: Schema) -> AvroSchema:
    return parse_avro(json.dumps(schema))


def unreadable(released: Path = RELEASED, current: dict[str, Schema] | None = None) -> list[str]:
    """What the last release wrote and the current schemas can't read; an event that is gone counts."""
    current = own_schemas() if current is None else current
    problems = []
    for path in sorted(released.glob("*.avsc")):
        if path.stem not in current:
            problems.append(f"{path.stem}: the event is gone, and the log still holds records of it")
            continue
        problems += [
            f"{path.stem}: {why}" for why in incompatibilities(current[path.stem], json.loads(path.read_text()))
        ]
    return problems


def say(line: str) -> None:
    """Prints a line: this is a command."""
    sys.stdout.write(line + "\n")


def main(argv: list[str]) -> int:
    """The command; returns its exit status."""
    match argv:
        case ["write"]:
            write()
        case ["release"]:
            write()
            write(RELEASED)
        case ["check"]:
            if names := stale():
                say(
                    f"schemas/avro differs from schemas/events.py in {', '.join(names)}: run `python -m schemas.files write`"
                )
            problems = unreadable()
            for problem in problems:
                say(f"incompatible with the last release: {problem}")
            return 1 if names or problems else 0
        case _:
            say(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
