"""`headrace classify` and `headrace embed`, against a made-up front door."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

import cli.front_door
import cli.small
from cli.main import cli as headrace
from cli.small import CALL_BYTES_MAX, CALL_ITEMS_MAX, FILE_BYTES_MAX, TEXT_BYTES_MAX, Item, item_of, likeness
from schemas.errors import HeadraceError

CLASSES = [{"label": "python", "score": 0.9}, {"label": "text", "score": 0.05}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    bodies: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        bodies.append(body)
        if body["model"] == "gone":
            error = {"message": "no model 'gone' is deployed", "code": "model_not_found"}
            return httpx.Response(404, json={"error": error})
        if request.url.path == "/v1/embeddings":
            first = None if body["model"] == "broken" else 1.0
            data: list[Any] = [{"embedding": [first, float(len(text)), 0.0, 0.0, 0.5]} for text in body["input"]]
        else:
            data = [{**CLASSES[0], "classes": CLASSES} for _ in body["input"]]
        return httpx.Response(200, json={"data": data})

    def client(url: str, _key: str) -> httpx.Client:
        return httpx.Client(base_url=url, transport=httpx.MockTransport(handler))

    monkeypatch.setattr(cli.front_door, "make_client", client)
    monkeypatch.setenv("HEADRACE_API_KEY", "hr-key")
    return bodies


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(headrace, arguments, input=stdin)


def test_files_texts_and_standard_input_are_classified(asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(range(256)))
    found = run("classify", "magika", str(file), "-", "--text", "import os", "--top-k", "2", "--json", stdin=b"x")
    assert found.exit_code == 0, found.output
    inputs = ["import os", *({"base64": base64.b64encode(raw).decode()} for raw in (bytes(range(256)), b"x"))]
    assert asked == [{"model": "magika", "input": inputs, "top_k": 2}]
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["input"] for row in rows] == ["import os", str(file), "-"]
    assert rows[0]["classes"] == CLASSES
    shown = run("classify", "magika", "--text", "import os").stdout
    assert "python" in shown
    assert "text 0.050" in shown


def test_many_files_are_several_calls(asked: list[Any]) -> None:
    texts = [option for number in range(CALL_ITEMS_MAX + 1) for option in ("--text", str(number))]
    assert run("classify", "m", *texts).exit_code == 0
    assert [len(body["input"]) for body in asked] == [CALL_ITEMS_MAX, 1]


def test_a_file_that_does_not_fit_leaves_the_others_alone(asked: list[Any], tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    small.write_bytes(b"x")
    found = run("classify", "m", str(large), str(small), "--json")
    assert found.exit_code == 1
    assert f"{large} is too large: at most {FILE_BYTES_MAX} bytes" in found.stderr
    assert [json.loads(line)["input"] for line in found.stdout.splitlines()] == [str(small)]


def test_files_are_read_when_their_call_is_made(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number in range(CALL_ITEMS_MAX * 3)]
    for file in files:
        file.write_bytes(b"x")
    read: list[int] = []

    def item(path: Path) -> Item:
        read.append(len(asked))
        return item_of(path)

    monkeypatch.setattr(cli.small, "item_of", item)
    assert run("classify", "m", *map(str, files)).exit_code == 0
    assert read == sorted(read)
    assert read.count(0) <= CALL_ITEMS_MAX + 1


def test_embeddings_and_how_alike_they_are(asked: list[Any]) -> None:
    shown = run("embed", "minilm", "ab", "abc", "--dimensions", "5").stdout
    assert asked == [{"model": "minilm", "input": ["ab", "abc"], "dimensions": 5}]
    assert "+1.0000, +2.0000, +0.0000, +0.0000, …" in shown
    assert f"{likeness([1, 2, 0, 0, 0.5], [1, 3, 0, 0, 0.5]):.3f}" in shown
    (row,) = [json.loads(line) for line in run("embed", "minilm", "ab", "--json").stdout.splitlines()]
    assert row == {"text": "ab", "embedding": [1.0, 2.0, 0.0, 0.0, 0.5]}
    assert likeness([0.0], [1.0]) == 0.0


def test_lines_of_files_and_of_standard_input_are_embedded_in_order(asked: list[Any], tmp_path: Path) -> None:
    """In calls of bounded size; each is shown when it is there."""
    file = tmp_path / "texts"
    file.write_bytes("grüße\n\n  \r\nlast".encode())
    lines = [f"line {number}" for number in range(CALL_ITEMS_MAX)]
    stdin = "".join(f"{line}\r\n" for line in lines).encode()
    found = run("embed", "minilm", "one", "-", "two", "-f", str(file), "--json", stdin=stdin)
    assert found.exit_code == 0, found.output
    texts = ["one", *lines, "two", "grüße", "last"]
    assert [body["input"] for body in asked] == [texts[:CALL_ITEMS_MAX], texts[CALL_ITEMS_MAX:]]
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["text"] for row in rows] == texts
    assert [row["embedding"][1] for row in rows] == [float(len(text)) for text in texts]


def test_what_is_large_is_asked_by_its_bytes(asked: list[Any]) -> None:
    large = "ü" * (CALL_BYTES_MAX // 3)
    found = run("embed", "minilm", "--json", stdin=f"{large}\n{large}\nlittle\n".encode())
    assert found.exit_code == 0, found.output
    assert [len(body["input"]) for body in asked] == [1, 2]


@pytest.mark.parametrize(
    ("stdin", "told"),
    [
        (b"good\n\xff\n", "-: line 2 isn't UTF-8"),
        (b"good\n" + b"x" * (TEXT_BYTES_MAX + 1), f"-: line 2 has more than {TEXT_BYTES_MAX} bytes"),
    ],
    ids=["bytes", "long"],
)
def test_a_line_that_is_no_text_is_told(asked: list[Any], stdin: bytes, told: str) -> None:
    found = run("embed", "minilm", "-", stdin=stdin)
    assert isinstance(found.exception, HeadraceError)
    assert told in found.exception.message


def test_without_a_text_it_says_what_to_give(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "all lines are blank" in run("embed", "minilm", stdin=b"\n \n").stderr
    assert not asked
    monkeypatch.setattr("click.get_binary_stream", lambda _name: SimpleNamespace(isatty=lambda: True))
    found = run("embed", "minilm")
    assert (found.exit_code, "lines on standard input" in found.stderr) == (2, True)
    assert isinstance(run("embed", "minilm", "\udcff").exception, HeadraceError)


def test_numbers_that_are_none_are_shown(asked: list[Any]) -> None:
    """The front door tells what isn't finite as null."""
    shown = run("embed", "broken", "ab", "abc")
    assert (shown.exit_code, "+nan, +2.0000" in shown.stdout) == (0, True)
    (row,) = [json.loads(line) for line in run("embed", "broken", "ab", "--json").stdout.splitlines()]
    assert row["embedding"] == [None, 2.0, 0.0, 0.0, 0.5]


def test_what_is_wrong_is_told(asked: list[Any]) -> None:
    assert "give files, or --text" in run("classify", "m").stderr
    found = run("embed", "gone", "a")
    assert isinstance(found.exception, HeadraceError)
    assert "no model 'gone'" in found.exception.message
