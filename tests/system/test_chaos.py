"""Everything is killed, frozen and restarted while callers read: each gets its whole answer, and the log tells of one ending a request.

The seed, the length and the number of streams come from CHAOS_SEED, CHAOS_MINUTES and CHAOS_STREAMS; `make chaos` sets a long run.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from schemas.events import InferenceAnswered
from tests.system.audit import Audit, Mark, Story
from tests.system.chaos_plan import plan
from tests.system.followers import STREAM_S_MAX, Followers
from tests.system.fragile import CHAOS, Fragile, running

SEED = int(os.environ.get("CHAOS_SEED", "1"))
MINUTES = float(os.environ.get("CHAOS_MINUTES", "0"))
STREAMS = int(os.environ.get("CHAOS_STREAMS", "500" if MINUTES else "64"))
DURATION_S = MINUTES * 60 or 30.0
CHUNKS = 15
TOKEN_MS = 4_000 * STREAMS // 800
"""About 200 events a second over all streams, which leaves a small machine room for restarts."""
BOOT_S_MAX = 120.0
AUDIT_S_MAX = 120.0

log = logging.getLogger("chaos")

pytestmark = pytest.mark.timeout(BOOT_S_MAX + DURATION_S + STREAM_S_MAX + AUDIT_S_MAX)


@pytest.fixture
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with running(tmp_path_factory.mktemp("chaos"), slots=max(64, STREAMS)) as fragile:
        yield fragile


def test_every_answer_is_whole_whatever_is_killed(fragile: Fragile) -> None:
    stack = fragile.stack
    audit, answers = Audit(stack), Mark(stack, "answers")
    callers = Followers(fragile.urls(), stack.keys, CHAOS, chunks=CHUNKS, token_ms=TOKEN_MS)
    began_s = time.monotonic()
    with callers.calling(stack.thread.loop, STREAMS):
        for step in plan(SEED, DURATION_S):
            time.sleep(max(0.0, began_s + step.at_s - time.monotonic()))
            log.info("after %.1f s: %s; %d streams open", time.monotonic() - began_s, step, callers.open)
            fragile.do(step)
        time.sleep(max(0.0, began_s + DURATION_S - time.monotonic()))
        fragile.settle()
    connections = sum(one.connections for one in callers.streams)
    log.info("%d streams over %d connections; refused: %s", len(callers.streams), connections, dict(callers.refused))

    faults = [(one.request_id, one.fault) for one in callers.streams if one.fault]
    assert not faults, f"{len(faults)} of {len(callers.streams)}: {faults[0]}\n{audit.standing()}\n{fragile.tell()}"
    # In half a minute on a busy machine it may be that nothing was cut, or changed hands: that proves less, and isn't wrong.
    assert not MINUTES or any(one.connections > 1 for one in callers.streams)
    fragile.await_ready()
    stories = audit.settled()
    _assert_callers_and_log_agree(callers, stories)
    _assert_answers(answers, stories)
    assert all(fragile.health(name, "livez") == (200, "ok") for name in stack.ops_ports)


def _assert_callers_and_log_agree(callers: Followers, stories: dict[str, Story]) -> None:
    """A request whose caller heard nothing of it may have been cancelled; all others were completed, with the caller's text."""
    for one in callers.streams:
        assert stories[one.request_id].endings[0][:2] == ("completed", None), one.request_id
        assert stories[one.request_id].text == one.text, one.request_id
    outcomes = Counter(story.endings[0][:2] for story in stories.values())
    assert set(outcomes) <= {("completed", None), ("failed", "cancelled")}, outcomes
    assert not MINUTES or any(len(story.attempts) > 1 for story in stories.values())


def _assert_answers(answers: Mark, stories: dict[str, Story]) -> None:
    """`answers` holds each whole text, and no other."""
    found: dict[str, set[str]] = {}
    for item in answers.records():
        if isinstance(item.event, InferenceAnswered):
            found.setdefault(item.event.request_id, set()).add("".join(each.text for each in item.event.choices))
    for name, story in stories.items():
        if story.endings[0][0] == "completed":
            assert found[name] == {story.script}, name
