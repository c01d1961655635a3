"""`headrace classify` and `headrace embed`: small models through the front door."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, print_json, table
from cli.front_door import KEY, URL, front_door, post
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import REQUEST_MAX_BYTES

if TYPE_CHECKING:
    import httpx
    from rich.table import Table

FILE_BYTES_MAX = REQUEST_MAX_BYTES * 3 // 4 - 4_096
"""The largest file that fits a request as base64."""
CALL_ITEMS_MAX = 64
CALL_BYTES_MAX = 4 * 1024 * 1024
NUMBERS_SHOWN = 4
TEXT_SHOWN_MAX = 60
TEXT_BYTES_MAX = REQUEST_MAX_BYTES
"""No longer line is a text that fits a request."""
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True, allow_dash=True)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object an input.")


@dataclass(frozen=True, slots=True)
class Item:
    """What is classified or embedded: its name, and what the front door gets."""

    name: str
    content: str | dict[str, str]
    size_bytes: int


@click.command()
@click.argument("model")
@click.argument("files", nargs=-1, type=_FILE)
@click.option("--text", "texts", multiple=True, help="Classify this text; may be given several times.")
@click.option("--top-k", type=click.IntRange(1), default=3, show_default=True, help="So many classes of each.")
@URL
@KEY
@_JSON
def classify(
    model: str,
    files: tuple[Path, ...],
    texts: tuple[str, ...],
    top_k: int,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Classify FILES (- is standard input), or texts, by MODEL. A file that can't be asked is told of, and the others are classified."""
    if not files and not texts:
        raise click.UsageError("give files, or --text")
    shown = table("input", "class", ">score", "then")
    refused: list[Path] = []
    with front_door(url, key) as client, _shown_at_last(shown):
        for items in _calls(chain(map(text_item, texts), _items(files, refused))):
            for item, found in zip(items, classified(client, model, items, top_k), strict=True):
                if as_json:
                    print_json({"input": item.name, **{name: found[name] for name in ("label", "score", "classes")}})
                    continue
                then = ", ".join(f"{other['label']} {_score(other['score'])}" for other in found["classes"][1:])
                shown.add_row(_short(item.name), found["label"], _score(found["score"]), then)
    if refused:
        raise SystemExit(1)


def classified(client: httpx.Client, model: str, items: Sequence[Item], top_k: int) -> list[dict[str, Any]]:
    """The classes of each item. Raises HeadraceError."""
    body = {"model": model, "input": [item.content for item in items], "top_k": top_k}
    data: list[dict[str, Any]] = post(client, "/v1/classifications", body)["data"]
    return data


@contextmanager
def _shown_at_last(shown: Table) -> Iterator[None]:
    """What was found is printed, also if a later call fails."""
    try:
        yield
    finally:
        if shown.row_count:
            console().print(shown)


def _items(files: Iterable[Path], refused: list[Path]) -> Iterator[Item]:
    """Each file when its turn comes, so that no more are in memory than one call has."""
    for path in files:
        try:
            yield item_of(path)
        except (HeadraceError, OSError) as error:
            refused.append(path)
            click.echo(error.message if isinstance(error, HeadraceError) else f"{path}: {error.strerror}", err=True)


def _calls(items: Iterable[Item]) -> Iterator[list[Item]]:
    call: list[Item] = []
    size = 0
    for item in items:
        if call and (len(call) == CALL_ITEMS_MAX or size + item.size_bytes > CALL_BYTES_MAX):
            yield call
            call, size = [], 0
        call.append(item)
        size += item.size_bytes
    if call:
        yield call


def item_of(path: Path) -> Item:
    """A file as the front door takes it; `-` is standard input. Raises HeadraceError (payload_too_large), and OSError."""
    if str(path) == "-":
        content = click.get_binary_stream("stdin").read(FILE_BYTES_MAX + 1)
    else:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise HeadraceError(
            Reason.PAYLOAD_TOO_LARGE, f"{path} is too large: at most {FILE_BYTES_MAX} bytes fit a request"
        )
    return Item(str(path), {"base64": base64.b64encode(content).decode()}, len(content))


def text_item(text: str) -> Item:
    """A text; its size is what it takes in a body. Raises HeadraceError (invalid_request) for an argument that isn't UTF-8."""
    try:
        return Item(text, text, len(json.dumps(text, ensure_ascii=False).encode()))
    except UnicodeEncodeError:
        raise HeadraceError(Reason.INVALID_REQUEST, f"{text!r} is no text: it isn't UTF-8") from None


def lines_of(name: str) -> Iterator[str]:
    """A file's lines that aren't blank, one after the other; `-` is standard input. Raises HeadraceError for one that is too long or no UTF-8, and OSError."""
    with click.open_file(name, "rb") as file:
        number = 0
        while line := file.readline(TEXT_BYTES_MAX + 1):
            number += 1
            if len(line) > TEXT_BYTES_MAX:
                text = f"{name}: line {number} has more than {TEXT_BYTES_MAX} bytes"
                raise HeadraceError(Reason.PAYLOAD_TOO_LARGE, text)
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise HeadraceError(Reason.INVALID_REQUEST, f"{name}: line {number} isn't UTF-8") from None
            if text and not text.isspace():
                yield text


def _texts(texts: Sequence[str], files: Sequence[Path]) -> Iterator[str]:
    for text in texts:
        yield from lines_of(text) if text == "-" else (text,)
    for file in files:
        yield from lines_of(str(file))


@click.command()
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--file", "-f", "files", multiple=True, type=_FILE, help="Embed each line of this file; may be given several times."
)
@click.option("--dimensions", type=click.IntRange(1), help="Cut each embedding to so many numbers.")
@URL
@KEY
@_JSON
def embed(
    model: str,
    texts: tuple[str, ...],
    files: tuple[Path, ...],
    dimensions: int | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Embed each TEXT by MODEL, in order; of several, how like the first each of the others is.

    - stands for the lines of standard input, one text each, which are read, too, where neither TEXT nor --file is given. Blank lines are passed over.
    """
    if not texts and not files:
        if click.get_binary_stream("stdin").isatty():
            raise click.UsageError("give texts, --file, or lines on standard input")
        texts = ("-",)
    shown = table("text", ">numbers", "the first of them", ">like the first")
    first: list[float] | None = None
    with front_door(url, key) as client, _shown_at_last(shown):
        for items in _calls(map(text_item, _texts(texts, files))):
            vectors = embedded(client, model, [item.name for item in items], dimensions)
            for item, vector in zip(items, vectors, strict=True):
                if as_json:
                    told = [None if math.isnan(number) else number for number in vector]
                    print_json({"text": item.name, "embedding": told})
                else:
                    shown.add_row(*_row(item.name, vector, first))
                first = first or vector
    if first is None:
        raise click.UsageError("there is no text: all lines are blank")


def _row(text: str, vector: Sequence[float], first: Sequence[float] | None) -> tuple[str, str, str, str]:
    few = ", ".join(f"{number:+.4f}" for number in vector[:NUMBERS_SHOWN])
    like = "" if first is None else f"{likeness(first, vector):.3f}"
    return _short(text), str(len(vector)), f"{few}{', …' if len(vector) > NUMBERS_SHOWN else ''}", like


def embedded(
    client: httpx.Client, model: str, texts: Sequence[str], dimensions: int | None = None
) -> list[list[float]]:
    """The embedding of each text; what isn't finite, which the front door tells as null, is NaN. Raises HeadraceError."""
    body: dict[str, Any] = {"model": model, "input": list(texts)}
    if dimensions is not None:
        body["dimensions"] = dimensions
    data = post(client, "/v1/embeddings", body)["data"]
    return [[math.nan if number is None else number for number in item["embedding"]] for item in data]


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two embeddings; 0 if one has no length."""
    lengths = math.hypot(*one) * math.hypot(*other)
    together = math.fsum(left * right for left, right in zip(one, other, strict=True))
    return together / lengths if lengths else 0.0


def _score(score: float | None) -> str:
    return "?" if score is None else f"{score:.3f}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_SHOWN_MAX else f"{line[: TEXT_SHOWN_MAX - 1]}…"
