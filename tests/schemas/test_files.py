"""The Avro files are those of the events, and an incompatible change is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from schemas.codec import own_schemas
from schemas.files import RELEASED, incompatibilities, main, stale, unreadable, write


def test_the_files_are_those_of_the_events() -> None:
    assert stale() == []


def test_what_the_last_release_wrote_can_be_read() -> None:
    assert list(RELEASED.glob("*.avsc"))
    assert unreadable() == []


def test_a_changed_or_missing_or_left_over_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "ModelPromoted.avsc").unlink()
    (tmp_path / "TokensGenerated.avsc").write_text("{}")
    (tmp_path / "Gone.avsc").write_text("{}")
    assert stale(tmp_path) == ["Gone", "ModelPromoted", "TokensGenerated"]


def test_a_new_field_without_default_is_refused() -> None:
    released = own_schemas()["ModelPromoted"]
    current = copy.deepcopy(released)
    current["fields"].append({"name": "colour", "type": "string"})
    assert any("colour" in why for why in incompatibilities(current, released))
    current["fields"][-1]["default"] = ""
    assert incompatibilities(current, released) == []


@pytest.mark.parametrize("change", ["type", "rename"])
def test_a_changed_field_is_refused(change: str) -> None:
    released = own_schemas()["ModelPromoted"]
    current = copy.deepcopy(released)
    current["fields"][1] = (
        {"name": "version", "type": "long"} if change == "type" else {"name": "release", "type": "string"}
    )
    assert incompatibilities(current, released)


def test_an_event_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Gone.avsc").write_text(json.dumps(own_schemas()["ModelPromoted"]))
    assert unreadable(tmp_path) == ["Gone: the event is gone, and the log still holds records of it"]


def test_the_command_tells_its_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "write" in capsys.readouterr().out
    assert main(["check"]) == 0
