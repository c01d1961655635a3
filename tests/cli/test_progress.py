from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.progress import HEARTBEAT_S, Board


def board(*, terminal: bool = False) -> tuple[Board, io.StringIO]:
    out = io.StringIO()
    return Board(Console(file=out, force_terminal=terminal, width=120)), out


def test_without_a_terminal_each_change_is_a_line() -> None:
    shown, out = board()
    with shown, shown.step("worker", "loading") as step:
        shown.note(step, "loading")
        shown.note(step, "waiting for the group")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["headrace: worker: loading", "headrace: worker: waiting for the group"]
    assert lines[2].startswith("headrace: worker: done in ")


def test_a_silent_step_is_mentioned_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out = board()
    with shown, shown.step("worker", "loading") as step:
        shown.beat()
        assert len(out.getvalue().splitlines()) == 1
        step.mentioned_s -= HEARTBEAT_S + 1
        shown.beat()
        shown.beat()
        assert "loading, 0 s so far" in out.getvalue()
        assert len(out.getvalue().splitlines()) == 2


def test_a_terminal_shows_what_failed() -> None:
    shown, out = board(terminal=True)
    with shown:
        with shown.step("good"):
            pass
        with pytest.raises(ZeroDivisionError), shown.step("bad", "dividing"):
            raise ZeroDivisionError
    assert "✓" in out.getvalue()
    assert "✗" in out.getvalue()
    assert "dividing" in out.getvalue()
