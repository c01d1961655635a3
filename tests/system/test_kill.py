"""kill -9 of each process under load: every admitted request gets exactly one ending, and no caller is left hanging."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from decisions.takeover import FAILURES_MAX
from infra.models_file import ModelEntry
from tests.system.audit import Audit
from tests.system.callers import CALL_S_MAX, Load
from tests.system.fixtures_models import BUSY, SESSION_MS, register, worker
from tests.system.running import RunningStack, script

pytestmark = pytest.mark.timeout(240)
CALLS = 48
DOOMED, INNOCENT = "doomed", 6
BROKEN_S_MAX = 5.0
"""How soon a caller sees that its front door is gone; a loaded machine included."""


@pytest.fixture
def load(stack: RunningStack, busy: str) -> Iterator[Load]:
    """Answers of about four seconds, under way."""
    running = Load(stack, busy, calls=CALLS, tokens=20, token_ms=200)
    running.until_flowing(CALLS // 4)
    yield running
    running.heard()


@pytest.fixture
def audit(stack: RunningStack) -> Audit:
    return Audit(stack)


def assert_served(stack: RunningStack, model: str = BUSY) -> None:
    """An ordinary call is answered."""
    answer = stack.client().chat.completions.create(model=model, messages=[{"role": "user", "content": "after all"}])
    assert answer.choices[0].message.content == "after all"


def test_a_worker_beside_another(stack: RunningStack, audit: Audit, busy: str) -> None:
    with worker(stack, "busy-b", busy):
        load = Load(stack, busy, calls=CALLS, tokens=20, token_ms=200)
        load.until_flowing(CALLS // 4)
        before = stack.pid("busy-a")
        stack.kill("busy-a")
        heard = load.heard()
        assert all(call.whole for call in heard), [call for call in heard if not call.whole]
        stories = audit.settled()
        assert len(stories) == CALLS
        assert any(len(story.attempts) > 1 for story in stories.values())
        assert_served(stack)
        stack.until_restarted("busy-a", before)


def test_the_only_worker(stack: RunningStack, audit: Audit, load: Load) -> None:
    before = stack.pid("busy-a")
    stack.kill("busy-a")
    heard = load.heard()
    assert all(call.whole for call in heard), [call for call in heard if not call.whole]
    stories = audit.settled()
    assert len(stories) == CALLS
    assert any(len(story.attempts) > 1 for story in stories.values())
    stack.until_restarted("busy-a", before)
    assert_served(stack)


def test_a_frozen_worker_that_wakes_up_after_its_session(stack: RunningStack, audit: Audit, busy: str) -> None:
    with worker(stack, "busy-b", busy):
        load = Load(stack, busy, calls=CALLS, tokens=20, token_ms=200)
        load.until_flowing(CALLS // 4)
        stack.pause("busy-a")
        time.sleep(SESSION_MS / 1000 + 2)  # its partitions are the other's by now
        stack.resume("busy-a")
        heard = load.heard()
        assert all(call.whole for call in heard), [call for call in heard if not call.whole]
        assert len(audit.settled()) == CALLS
        stack.await_ready("busy-a")
        assert_served(stack)


def test_admission(stack: RunningStack, audit: Audit, busy: str) -> None:
    load = Load(stack, busy, calls=CALLS, tokens=20, token_ms=200)
    load.until_flowing(1)
    before = stack.pid("admission-interactive")
    stack.kill("admission-interactive")
    late = Load(stack, busy, calls=8, tokens=2, token_ms=10)  # admission is gone when they come
    heard = [*load.heard(), *late.heard()]
    assert all(call.whole for call in heard), [call for call in heard if not call.whole]
    # One asked just before may be admitted once more: its offset was not yet committed when admission died.
    assert sum(story.asked is not None for story in audit.settled().values()) == CALLS + 8
    stack.until_restarted("admission-interactive", before)
    assert_served(stack)


def test_endings(stack: RunningStack, audit: Audit, load: Load) -> None:
    before = stack.pid("endings")
    stack.kill("endings")
    heard = load.heard()
    assert all(call.whole for call in heard), [call for call in heard if not call.whole]
    stack.until_restarted("endings", before)
    assert len(audit.settled()) == CALLS
    assert_served(stack)


def test_the_front_door(stack: RunningStack, audit: Audit, load: Load) -> None:
    """Callers see a broken connection at once. Nobody is left to cancel what they asked, so it is answered to the end."""
    before = stack.pid("bridge")
    stack.kill("bridge")
    killed_s = time.monotonic()
    heard = load.heard()
    assert all(call.error is not None for call in heard)
    assert max(call.finished_s for call in heard) - killed_s < BROKEN_S_MAX
    assert all(call.expected.startswith(call.text) for call in heard)
    stories = audit.settled()
    assert len(stories) == CALLS
    assert Counter(story.endings[0][:2] for story in stories.values()) == {("completed", None): CALLS}
    stack.until_restarted("bridge", before)
    assert_served(stack)


def test_one_slow_job_among_many_quick_ones(stack: RunningStack, audit: Audit, single: str) -> None:
    """One partition: the first job takes long, the others are done at once. The worker dies meanwhile."""
    slow = Load(stack, single, calls=1, tokens=40, token_ms=150)
    slow.until_flowing(1)
    quick = Load(stack, single, calls=49, tokens=1, token_ms=0)
    assert all(call.whole for call in quick.heard())
    before = stack.pid("single-a")
    stack.kill("single-a")
    assert [call.whole for call in slow.heard()] == [True]
    stories = audit.settled()
    assert len(stories) == 50
    assert sum(len(story.attempts) > 1 for story in stories.values()) >= 1
    stack.until_restarted("single-a", before)
    time.sleep(1)  # whatever a new owner might still write by mistake
    assert {name: story.endings[0] for name, story in audit.settled().items()} == {
        name: story.endings[0] for name, story in stories.items()
    }
    assert_served(stack, single)


def test_a_request_that_ends_its_workers_is_ended_and_no_other(stack: RunningStack, audit: Audit) -> None:
    """Its neighbours die with it twice, then each runs alone: they are answered to the end, and it fails a third time by itself."""
    register(stack, ModelEntry(DOOMED, "1", "scripted", "scripted", 4096, slots=16, partitions=1))
    with worker(stack, "doomed-a", DOOMED), worker(stack, "doomed-b", DOOMED), ThreadPoolExecutor(1) as beside:
        load = Load(stack, DOOMED, calls=INNOCENT, tokens=20, token_ms=200)
        load.until_flowing(INNOCENT // 2)
        bad = script(tokens=["bad "], repeat=5, token_ms=200, **{"raise": "exit"})
        asking = beside.submit(ask, stack.client().with_options(timeout=CALL_S_MAX), bad)
        heard = load.heard()
        assert all(call.whole for call in heard), [call for call in heard if not call.whole]
        with pytest.raises(openai.InternalServerError, match="stopped several workers"):
            asking.result(CALL_S_MAX)
        stories = audit.settled().values()
        assert_served(stack, DOOMED)
    assert Counter(story.endings[0][:2] for story in stories) == {
        ("completed", None): INNOCENT,
        ("failed", "poisoned"): 1,
    }
    assert max(story.stream.failures for story in stories) == FAILURES_MAX
    assert sum(story.stream.failures == FAILURES_MAX - 1 for story in stories) == INNOCENT
    (text,) = [story.text for story in stories if story.stream.failures == FAILURES_MAX]
    assert ("bad " * 5).startswith(text)


def ask(client: openai.OpenAI, content: str) -> str | None:
    answer = client.chat.completions.create(model=DOOMED, messages=[{"role": "user", "content": content}])
    text: str | None = answer.choices[0].message.content
    return text
