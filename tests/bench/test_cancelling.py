from __future__ import annotations

import pytest

from bench import cancelling


async def test_the_peers_next_begins_once_the_first_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first would go on for minutes: that there is a figure at all says that it gave up its slot."""
    monkeypatch.setattr(cancelling, "QUEUED_S", 0.0)
    assert await cancelling._in_process() >= 0
