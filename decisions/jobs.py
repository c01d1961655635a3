"""A batch job: the ids of its requests, which lines travel together, and what of it is done. So a job that was cut off goes on where it was.

A job's lines are gathered into units, in order: a unit is what is asked with one request (several lines of a small model's, one row each), or the
requests of one line. How they are gathered depends on the lines alone, so whoever reads them again gathers them again in the same way, and a request's
id tells its unit. Nothing here reads a clock, draws at random or does I/O.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, TypeVar

from schemas.events import ModelVersionRegistered
from schemas.ids import request_id, tail
from schemas.parts import Tensor
from schemas.reasons import lookup
from schemas.tensors import BYTES, ITEM_BYTES, elements, pack, unpack

ROWS_MAX = 64
"""Rows of lines that travel in one request; a line that has more by itself travels alone."""
BYTES_MAX = 256 * 1024
"""Bytes of such lines."""
SPLIT_PART = 128
"""The part of a unit's first line when its lines are asked one by one."""
PARTS_MAX = 256
TRIES_MAX = 256
UNITS_MAX = 1 << 32
TAG_BYTES = 4
RESERVED_UNITS_MIN, RESERVED_UNITS_MAX = 8, 256
RESERVED_BYTES = 16 * 1024 * 1024

T = TypeVar("T")
K = TypeVar("K")

Numbers = list[tuple[int, int]]
"""Of lines: ranges, each by its first and last, in order."""


# --- ids -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A request of a job: of which unit, which of its requests, and how often it was asked before.

    `part` counts the prompts of a line that has several; from `SPLIT_PART` on, the lines of a unit that are asked one by one.
    """

    unit: int
    part: int = 0
    tries: int = 0


def part_id(created_ms: int, tag: bytes, part: Part) -> str:
    """The request's id: a UUIDv7 of the job's time, that holds the job's tag (`TAG_BYTES`), and says which part it is."""
    numbers = part.tries.to_bytes(1, "big") + part.unit.to_bytes(4, "big") + part.part.to_bytes(1, "big")
    # A UUIDv7 overwrites the first four bits, and two of the third byte: no bit of a number is there.
    return request_id(created_ms, tag[:TAG_BYTES] + numbers)


def prefix_of(created_ms: int, tag: bytes) -> str:
    """What all ids of a job begin with, and no others."""
    return part_id(created_ms, tag, Part(0))[:_PREFIX_CHARS]


def part_of(text: str) -> Part:
    """The part that an id of a job names."""
    numbers = tail(text)[-6:]
    return Part(int.from_bytes(numbers[1:5], "big"), numbers[5], numbers[0])


_PREFIX_CHARS = 23  # 8-4-4-4 digits and their dashes up to the numbers, less the dash before the last group


def tag_of(seed: bytes) -> bytes:
    """A job's tag, from what is its own."""
    return hashlib.sha256(seed).digest()[:TAG_BYTES]


# --- gathering -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weight:
    """Of a line: what it can travel with (None: alone), its rows and bytes."""

    kind: object | None
    rows: int = 1
    size_bytes: int = 0


def gathered(
    lines: Iterable[T], weigh: Callable[[T], Weight], rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
) -> Iterator[list[T]]:
    """The lines, as units. What travels together has one kind and follows one another, at most so many rows and bytes."""
    unit: list[T] = []
    kind: object | None = None
    rows = size = 0
    for line in lines:
        weight = weigh(line)
        fits = unit and weight.kind is not None and weight.kind == kind
        if unit and not (fits and rows + weight.rows <= rows_max and size + weight.size_bytes <= bytes_max):
            yield unit
            unit, rows, size = [], 0, 0
        unit.append(line)
        kind, rows, size = weight.kind, rows + weight.rows, size + weight.size_bytes
    if unit:
        yield unit


def merged(inputs: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The inputs of several lines as those of one request: each tensor's rows after the rows of the line before."""
    together = []
    for tensors in zip(*inputs, strict=True):
        first = tensors[0]
        shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
        together.append(Tensor(first.name, first.datatype, shape, b"".join(tensor.data for tensor in tensors)))
    return tuple(together)


def parted(outputs: Sequence[Tensor], rows: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The outputs of such a request, as those of its lines, of which each has so many rows. Raises ValueError if they have others."""
    for tensor in outputs:
        if not tensor.shape or tensor.shape[0] != sum(rows):
            raise ValueError(
                f"the output `{tensor.name}` has the shape {list(tensor.shape)}, and {sum(rows)} rows were asked"
            )
    each = [_parted(tensor, rows) for tensor in outputs]
    return [tuple(parts[line] for parts in each) for line in range(len(rows))]


def _parted(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    width = elements(tensor.shape[1:])
    items = list(unpack(tensor.data)) if tensor.datatype == BYTES else []
    size = ITEM_BYTES.get(tensor.datatype, 0)
    found, at = [], 0
    for count in rows:
        start, end = at * width, (at + count) * width
        data = pack(items[start:end]) if tensor.datatype == BYTES else tensor.data[start * size : end * size]
        found.append(Tensor(tensor.name, tensor.datatype, (count, *tensor.shape[1:]), data))
        at += count
    return found


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """A total split in proportion to the weights, in whole numbers that add up to it."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    ends, so_far = [0], 0
    for weight in weights:
        so_far += weight
        ends.append(total * so_far // whole)
    return [after - before for before, after in itertools.pairwise(ends)]


def form_of(version: ModelVersionRegistered) -> str:
    """A name for all of a version that a line's understanding, and so its gathering, depends on."""
    specs = [[asdict(spec) for spec in side] for side in (version.inputs, version.outputs)]
    form = [version.processor, *specs, version.batched]
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()


def unlike(
    served: Mapping[str, tuple[str, str]], versions: Mapping[tuple[str, str], ModelVersionRegistered]
) -> str | None:
    """Why the lines of a job can't be understood as they were when it was begun, or None."""
    for model, (version, form) in served.items():
        if (now := versions.get((model, version))) is None:
            return f"the version {version} of the model {model}, which its lines were checked with, is gone"
        if form_of(now) != form:
            return f"the version {version} of the model {model} takes or gives other things than when its lines were checked"
    return None


def reserved(unit_bytes: int) -> int:
    """How many units, of about such a size, are said to have been asked before they are, so that this isn't written down for each.

    A job that was killed holds them all when it goes on.
    """
    return max(RESERVED_UNITS_MIN, min(RESERVED_UNITS_MAX, RESERVED_BYTES // max(unit_bytes, 1)))


# --- what is done ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Done:
    """Units by their numbers: all below `below`, and those in `above`. It holds as many numbers as are out of order, however many are done."""

    below: int = 0
    above: set[int] = field(default_factory=set)

    def add(self, unit: int) -> None:
        """A unit is done."""
        if unit < self.below:
            return
        self.above.add(unit)
        while self.below in self.above:
            self.above.discard(self.below)
            self.below += 1

    def __contains__(self, unit: int) -> bool:
        return unit < self.below or unit in self.above


@dataclass(frozen=True, slots=True)
class Tries:
    """Of a request: how often it was asked before, and how often of those it was refused, or failed, for a reason that passes."""

    asked: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(slots=True)
class Job:
    """What is kept of a job beside its output.

    Attributes:
        created_ms, seed: from which its requests' ids come.
        input_digest: the SHA-256 of its input, and `options` what else shapes its requests: a job goes on with the same alone.
        lines: how many it has.
        tenant, cluster: whose requests they are, and in which Kafka cluster; empty until the first is asked.
        served: what the check of its lines found of each model that they name and that is deployed: its version, and the `form_of` that.
        prompts: whether that check looked for language models, too.
        out_bytes, out_crc32: so much of the output is whole, and its checksum; what follows was cut off.
        positions: of each partition of `answers` the offset up to which answers are in the output.
        asked: units that may have been asked are below this number.
        split: units whose lines are asked one by one.
        tries: of a request (`unit` times `PARTS_MAX` plus its part), what came of it before.
        repeats: how many lines have an earlier one's id; they aren't asked.
        done, failed: of the lines in the output, those with an answer, and those with an error.
        reasons: of those with an error, how many have which reason.
        only: the numbers of the lines that are asked; None if all are. `earlier` is how many of the others are in the output.
    """

    created_ms: int
    seed: str
    input_digest: str
    options: dict[str, Any]
    lines: int
    served: dict[str, tuple[str, str]] = field(default_factory=dict)
    out_bytes: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    asked: int = 0
    units: Done = field(default_factory=Done)
    split: set[int] = field(default_factory=set)
    tries: dict[int, Tries] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    tenant: str = ""
    cluster: str = ""
    repeats: int = 0
    out_crc32: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    only: Numbers | None = None
    earlier: int = 0
    prompts: bool = True

    @property
    def tag(self) -> bytes:
        """Of its ids."""
        return tag_of(self.seed.encode())

    @property
    def finished(self) -> bool:
        """Whether every line is in the output."""
        return self.done + self.failed >= self.lines

    @property
    def may_pass(self) -> int:
        """How many lines have an error whose reason may pass: they are asked again when the job is run once more."""
        return sum(count for reason, count in self.reasons.items() if lookup(reason).retriable)

    @property
    def prefix(self) -> str:
        """What its ids begin with, and no others."""
        return prefix_of(self.created_ms, self.tag)

    def claim(self, tenant: str, cluster: str) -> str | None:
        """It is asked for this tenant, in this cluster ("" if that isn't known). Why it can't be, or None: what was asked is elsewhere."""
        if self.tenant not in ("", tenant):
            return f"it was begun for the tenant {self.tenant}, and this is {tenant}"
        if cluster and self.cluster not in ("", cluster):
            return f"it was begun in the Kafka cluster {self.cluster}, and this is {cluster}"
        self.tenant, self.cluster = tenant, cluster or self.cluster
        return None

    def part(self, unit: int, part: int) -> Part:
        """A request, as it is asked now."""
        return Part(unit, part, self.tries_of(unit, part).asked)

    def tries_of(self, unit: int, part: int) -> Tries:
        """What came of a request before."""
        return self.tries.get(unit * PARTS_MAX + part, Tries())

    def id_of(self, unit: int, part: int) -> str:
        """A request's id, as it is asked now."""
        return part_id(self.created_ms, self.tag, self.part(unit, part))

    def try_again(self, part: Part, refused: int = 0, failed: int = 0) -> None:
        """It was refused or failed: it is asked anew, under another id, since the stream of this one is closed."""
        before = self.tries_of(part.unit, part.part)
        now = Tries(part.tries + 1, before.refused + refused, before.failed + failed)
        self.tries[part.unit * PARTS_MAX + part.part] = now

    def written(self, unit: int, good: int, reasons: Sequence[str] = ()) -> None:
        """A unit's lines are in the output: so many answers, and errors with these reasons."""
        self.units.add(unit)
        self.split.discard(unit)
        for key in [key for key in self.tries if key // PARTS_MAX == unit]:
            del self.tries[key]
        self.done += good
        self.failed += len(reasons)
        self.reasons.update(reasons)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "version": VERSION,
            "created_ms": self.created_ms,
            "seed": self.seed,
            "input_digest": self.input_digest,
            "options": self.options,
            "lines": self.lines,
            "served": {model: list(found) for model, found in self.served.items()},
            "out_bytes": self.out_bytes,
            "out_crc32": self.out_crc32,
            "positions": {str(number): offset for number, offset in self.positions.items()},
            "asked": self.asked,
            "below": self.units.below,
            "above": sorted(self.units.above),
            "split": sorted(self.split),
            "tries": {str(key): list(astuple(tries)) for key, tries in self.tries.items()},
            "done": self.done,
            "failed": self.failed,
            "tenant": self.tenant,
            "cluster": self.cluster,
            "repeats": self.repeats,
            "reasons": self.reasons,
            "only": self.only,
            "earlier": self.earlier,
            "prompts": self.prompts,
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Job:
        """What `to_json` gave. Raises ValueError for anything else."""
        try:
            if kept["version"] not in READABLE:
                raise ValueError(f"it was written by another version ({kept['version']})")
            job = cls(
                kept["created_ms"], kept["seed"], kept["input_digest"], dict(kept["options"]), kept["lines"],
                {model: (version, form) for model, (version, form) in kept["served"].items()}, kept["out_bytes"], {int(number): offset for number, offset in kept["positions"].items()}, kept["asked"],
                Done(kept["below"], set(kept["above"])), set(kept["split"]),
                {int(key): Tries(*counts) for key, counts in kept["tries"].items()}, kept["done"], kept["failed"],
                kept["tenant"], kept["cluster"], kept["repeats"], kept["out_crc32"],
                Counter(kept.get("reasons", {})), _numbers(kept.get("only")), kept.get("earlier", 0),
                kept.get("prompts", False),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return job


def _numbers(kept: Any) -> Numbers | None:
    return None if kept is None else [(first, last) for first, last in kept]


VERSION = 6
READABLE = (4, 5, VERSION)
"""4 knew of no lines that are asked again; it may have any. Neither it nor 5 looked for language models, or kept reasons."""
