"""The broker is restarted, killed and frozen: callers are told in time, nothing acknowledged is lost, every process is itself again.

CHAOS_MINUTES makes it long: the broker then stays frozen for a minute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from infra import ports
from infra.broker import EmbeddedKafka
from infra.supervisor import ChildState
from tests.system.audit import Audit
from tests.system.chaos_plan import BRIDGES, WORKERS
from tests.system.followers import TRY_AGAIN, Followers
from tests.system.fragile import CHAOS, Fragile, running

LONG = "CHAOS_MINUTES" in os.environ
FROZEN_S = 60.0 if LONG else 13.0
"""Longer than every session."""
AWAY_S = 20.0 if LONG else 3.0
CALLERS, CHUNKS, TOKEN_MS = 24, 15, 300
TOLD_S_MAX = 30.0
"""How soon /readyz says that the log can't be reached."""
REFUSED_S_MAX = 20.0
"""How soon a call is refused: the front door waits 5 s for the log."""
READY_S_MAX = 120.0

pytestmark = pytest.mark.timeout(420 if LONG else 300)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with running(tmp_path_factory.mktemp("broker-trouble")) as fragile:
        yield fragile


Hurt = Callable[[EmbeddedKafka], None]


@pytest.mark.parametrize(
    ("hurt", "heal", "away_s"),
    [
        (EmbeddedKafka.stop, EmbeddedKafka.start, AWAY_S),
        (EmbeddedKafka.kill, EmbeddedKafka.start, AWAY_S),
        (EmbeddedKafka.pause, EmbeddedKafka.resume, FROZEN_S),
    ],
    ids=["restarted", "killed", "frozen"],
)
def test_answers_outlive_the_broker(fragile: Fragile, hurt: Hurt, heal: Hurt, away_s: float) -> None:
    stack = fragile.stack
    audit = Audit(stack)
    pids = {name: stack.pid(name) for name in stack.ops_ports}
    callers = Followers(fragile.urls(), stack.keys, CHAOS, chunks=CHUNKS, token_ms=TOKEN_MS)
    with callers.calling(stack.thread.loop, CALLERS):
        stack.until(lambda: callers.flowing >= CALLERS // 2)
        hurt(fragile.broker)
        try:
            away_until_s = time.monotonic() + away_s
            assert_refused_in_time(fragile)
            for name in stack.ops_ports:
                fragile.until_says(name, "readyz", 503, TOLD_S_MAX)
                assert fragile.says(name, "livez") == 200, name
            time.sleep(max(0.0, away_until_s - time.monotonic()))
        finally:
            heal(fragile.broker)
        fragile.await_ready(READY_S_MAX)
        began = len(callers.streams)
        stack.until(lambda: len(callers.streams) > began and not callers.streams[began].fault)
    assert not [(one.request_id, one.fault) for one in callers.streams if one.fault]
    stories = audit.settled()
    assert all(stories[one.request_id].text == one.text for one in callers.streams)
    assert all(fragile.says(name, what) == 200 for name in stack.ops_ports for what in ("livez", "readyz"))
    # An engine takes long to load, and callers have their connections: neither need be lost for the broker's sake.
    assert {name: stack.pid(name) for name in (*BRIDGES, WORKERS[0])} == {
        name: pids[name] for name in (*BRIDGES, WORKERS[0])
    }


def assert_refused_in_time(fragile: Fragile) -> None:
    """New calls get a status that says to try again, and don't wait for the broker."""
    headers = {"authorization": f"Bearer {fragile.stack.keys['acme']}"}
    body = {"model": CHAOS, "messages": [{"role": "user", "content": "nobody answers this"}]}

    def ask(url: str) -> httpx.Response:
        return httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=headers, timeout=REFUSED_S_MAX, trust_env=False
        )

    with ThreadPoolExecutor() as threads:
        for answer in threads.map(ask, fragile.urls()):
            assert answer.status_code in TRY_AGAIN, answer.text
            assert "retry-after" in answer.headers


def test_everything_starts_before_the_broker_and_its_topics(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any-order")
    broker = EmbeddedKafka(folder / "kafka", ports.free_port())
    fragile = Fragile(broker, folder / "stack")
    stack = fragile.stack
    try:
        fragile.start()
        for name in stack.ops_ports:
            said(fragile, name, f"{broker.bootstrap} can't be reached")
            assert fragile.says(name, "livez") == 200
        broker.start()
        for name in stack.ops_ports:
            said(fragile, name, "headrace topics ensure")
        fragile.prepare()
        fragile.await_ready(READY_S_MAX)
        answer = stack.client().chat.completions.create(model=CHAOS, messages=[{"role": "user", "content": "at last"}])
        assert answer.choices[0].message.content == "at last"
        assert all((status.state, status.restarts) == (ChildState.RUNNING, 0) for status in stack.supervisor.status())
    finally:
        fragile.close()
        broker.stop()


def said(fragile: Fragile, name: str, words: str) -> None:
    """Returns once a process gives this as the reason why it isn't ready."""

    def look() -> bool:
        try:
            status, text = fragile.health(name, "readyz")
        except httpx.TransportError:
            return False
        return status == 503 and words in text

    fragile.stack.until(look, TOLD_S_MAX)
