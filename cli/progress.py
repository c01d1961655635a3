"""What `headrace up` shows while it starts: each step, what is awaited, and for how long. Live on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

HEARTBEAT_S = 10.0
"""Without a terminal, a step that takes longer is mentioned this often."""
REFRESHES_PER_S = 8
NOTE_MAX = 100


@dataclass(slots=True)
class Step:
    """One thing that is being done. `note` says what is awaited."""

    name: str
    note: str = ""
    started_s: float = field(default_factory=time.monotonic)
    mentioned_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    failed: bool = False

    @property
    def elapsed_s(self) -> float:
        """For how long it has been going on, or how long it took."""
        return (self.ended_s or time.monotonic()) - self.started_s


class Board:
    """The steps of a start-up. Use as a context manager; safe to call from other threads, as each call does one assignment."""

    def __init__(self, console: Console) -> None:
        """Shows nothing yet."""
        self.console = console
        self._steps: list[Step] = []
        self._live: Live | None = None
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the board was made."""
        return time.monotonic() - self._began_s

    def __enter__(self) -> Self:
        """Begins to show."""
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._render, console=self.console, refresh_per_second=REFRESHES_PER_S, transient=False
            )
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextlib.contextmanager
    def step(self, name: str, note: str = "starting") -> Iterator[Step]:
        """Shows a step for as long as the block runs; an exception marks it as failed."""
        step = Step(name)
        self._steps.append(step)
        self.note(step, note)
        try:
            yield step
        except BaseException:
            step.failed, step.ended_s = True, time.monotonic()
            raise
        step.ended_s = time.monotonic()
        self._say(f"{name}: done in {step.elapsed_s:.1f} s")

    def note(self, step: Step, text: str) -> None:
        """Says what the step is waiting for."""
        text = text.strip()
        if text and text != step.note:
            step.note = text
            self._say(f"{step.name}: {text}")
            step.mentioned_s = time.monotonic()

    def beat(self) -> None:
        """Call now and then: mentions the steps that have been silent for long."""
        now_s = time.monotonic()
        for step in self._steps:
            if step.ended_s is None and now_s - step.mentioned_s > HEARTBEAT_S:
                step.mentioned_s = now_s
                self._say(f"{step.name}: {step.note}, {step.elapsed_s:.0f} s so far")

    def _say(self, text: str) -> None:
        if self._live is None:
            self.console.print(f"headrace: {text}", markup=False)

    def _render(self) -> Table:
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for step in list(self._steps):
            if step.failed:
                mark: Spinner | Text = Text("✗", style="red")
            elif step.ended_s is not None:
                mark = Text("✓", style="green")
            else:
                mark = Spinner("dots")
            open_ = step.ended_s is None
            note = step.note[:NOTE_MAX] if open_ or step.failed else ""
            grid.add_row(
                mark, step.name, Text(f"{step.elapsed_s:5.1f} s", style="" if open_ else "dim"), Text(note, style="dim")
            )
        return grid
