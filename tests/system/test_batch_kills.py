"""A batch job that is killed over and over: each line's answer stands in the output once, and the log tells that it was asked and computed once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cli.models import register_versions, version_of
from infra.models_file import ModelEntry
from schemas.events import GenerationStarted, InferenceAnswered, InferenceRequested
from tests.cli.batch_crash import POINTS
from tests.small_models import rows_of
from tests.system.audit import Mark
from tests.system.fixtures_models import worker
from tests.system.running import COMMAND_WAIT_S, ROOT, RunningStack, script

pytestmark = pytest.mark.timeout(240)
SEED = 21
LINES = 1_440
"""More than a fast machine does in the seconds that all runs but the last have together."""
WINDOW = 16
TOKEN_MS, SLOW_MS, SLOW_EVERY = 60, 6_000, 60
"""Of one line in so many the answer is slower than the next run's start: it asks again what the log is at."""
DELAYS_S = (0.3, 1.5)
"""When a run is killed, about: from before the interpreter has read the command to the middle of its work."""
SMALL = "killed-magika"
SIGNALS = (signal.SIGKILL, signal.SIGINT)
ONCE = ("InferenceAdmitted", "InferenceStarted", "InferenceCompleted", "InferenceAnswered")


@pytest.fixture(scope="module")
def small_model(stack: RunningStack) -> Iterator[str]:
    """The classifier of files, and one worker."""
    entry = ModelEntry(SMALL, "1", "onnx", "package:magika", 512, slots=64, processor="bytes-classification")
    stack.thread.run(register_versions(stack.kafka, [version_of(entry, stack.data_dir, lambda _text: None)]))
    with worker(stack, f"{SMALL}-a", SMALL):
        yield SMALL


# --- the lines, and what the log holds of them -----------------------------------------------------------------------


def line(number: int, llm: str, small: str) -> dict[str, Any]:
    """Of four lines two are of a small model and travel together, one has two prompts, and one has another answer each time that it is computed."""
    match number % 4:
        case 0 | 1:
            text = f"import os\n\nfor name in os.listdir():\n    print(name)  # {number}\n" * 4
            url, asked = "/v1/classifications", {"model": small, "input": text, "top_k": 1}
        case 2:
            prompts = [script(tokens=[f"{number} ", side], token_ms=TOKEN_MS) for side in ("left", "right")]
            url, asked = "/v1/completions", {"model": llm, "prompt": prompts, "max_tokens": 64}
        case _:
            sleep_ms = SLOW_MS if number % SLOW_EVERY == 3 else 0
            content = script(nonce=True, line=number, sleep_ms=sleep_ms)
            messages = [{"role": "user", "content": content}]
            url, asked = "/v1/chat/completions", {"model": llm, "messages": messages, "max_tokens": 64}
    return {"custom_id": f"n{number}", "method": "POST", "url": url, "body": asked}


def asks_of(request: InferenceRequested) -> list[str]:
    """What of which lines a request asks."""
    if request.inputs is not None:
        return [row.decode().rsplit("# ", 1)[1].strip() for row in rows_of(request)]
    if request.messages is not None:
        return [str(json.loads(request.messages[-1].content)["line"])]
    return ["".join(json.loads(request.prompt or "")["tokens"])]


@dataclass
class Told:
    """What the log tells of a job: under which ids each thing was asked, and what it holds of each id beside the stream."""

    ids: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    events: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    started: Counter[str] = field(default_factory=Counter)
    answers: dict[str, InferenceAnswered] = field(default_factory=dict)

    @classmethod
    def of(cls, mark: Mark) -> Told:
        """All since the mark."""
        told = cls()
        for record in mark.records():
            event: Any = record.event
            told.started[getattr(event, "request_id", "")] += isinstance(event, GenerationStarted)
            if record.topic.startswith("tokens"):
                continue
            if isinstance(event, InferenceRequested):
                for what in asks_of(event):
                    told.ids[what].add(event.request_id)
            if isinstance(event, InferenceAnswered):
                told.answers[event.request_id] = event
            if (request_id := getattr(event, "request_id", None)) is not None:
                told.events[request_id][record.name] += 1
        return told

    @property
    def repeats(self) -> int:
        """How often the log was asked what it had been asked before, under the same id."""
        return sum(events["InferenceRequested"] - 1 for events in self.events.values() if events["InferenceRequested"])


def assert_whole(out: Path, told: Told) -> None:
    """The output has each line once, in the form of OpenAI's batches, with the answer that the log holds."""
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert Counter(each["custom_id"] for each in lines) == Counter(f"n{number}" for number in range(LINES))
    for each in lines:
        number, response = int(each["custom_id"][1:]), each["response"]
        assert (each["error"], response["status_code"]) == (None, 200)
        assert each["id"] == f"batch_req_{response['request_id']}"
        match number % 4:
            case 0 | 1:
                assert [item["label"] for item in response["body"]["data"]] == ["python"]
            case 2:
                texts = [choice["text"] for choice in response["body"]["choices"]]
                assert texts == [f"{number} left", f"{number} right"]
            case _:
                (choice,) = told.answers[response["request_id"]].choices
                assert [found["message"]["content"] for found in response["body"]["choices"]] == [choice.text]
                assert len(choice.text) == 32


def assert_asked_and_computed_once(told: Told) -> None:
    """Each thing was asked under one id, and each id was let in, started, ended and answered once."""
    assert len(told.ids) == LINES // 4 * 5
    assert {what: ids for what, ids in told.ids.items() if len(ids) > 1} == {}
    assert set(told.events) == set().union(*told.ids.values())
    for events in told.events.values():
        assert [events[name] for name in ONCE] == [1] * len(ONCE), events
        assert set(events) <= {*ONCE, "InferenceRequested", "InferenceJoined"}


# --- the kills -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """When a run is killed: as it passes a point the `count`-th time, or, with none, after so long."""

    number: signal.Signals
    point: str = ""
    count: int = 1
    delay_s: float = 0.0


def moments(seed: int) -> list[Moment]:
    """Before anything is asked, then each point and delay in some order; with both signals by turns."""
    rng = random.Random(seed)
    often = {"asked": 12, "confirmed": 12, "heard": 12, "torn": 12, "unnoted": 2, "noted": 3}
    rest = [(point, rng.randint(1, often.get(point, 1)), 0.0) for point in POINTS[1:]]
    rest += [("", 1, delay_s * rng.uniform(0.5, 1.5)) for delay_s in DELAYS_S]
    rng.shuffle(rest)
    return [Moment(SIGNALS[at % 2], *each) for at, each in enumerate([(POINTS[0], 1, 0.0), *rest])]


class Command:
    """The command, and runs of it."""

    def __init__(self, stack: RunningStack, source: Path, out: Path) -> None:
        self.arguments = ("batch", "run", str(source), str(out), "--tenant", "acme", "--json", "--window", str(WINDOW))
        self._env = {**os.environ, **stack.env}

    def killed(self, moment: Moment, meanwhile: Callable[[], object] = lambda: None) -> int:
        """One run to the moment, or its end: its status."""
        program = ["cli.main"]
        if moment.point:
            program = ["tests.cli.batch_crash", moment.number.name, moment.point, str(moment.count)]
        argv = [sys.executable, "-m", *program, *self.arguments]
        with subprocess.Popen(
            argv, cwd=ROOT, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            meanwhile()
            if not moment.point:
                time.sleep(moment.delay_s)
                process.send_signal(moment.number)
            return process.wait(COMMAND_WAIT_S)


def test_a_job_that_is_killed_over_and_over_asks_and_computes_each_line_once(
    stack: RunningStack, busy: str, small_model: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{json.dumps(line(number, busy, small_model))}\n" for number in range(LINES)))
    mark = Mark(stack, "requests.batch", "lifecycle", "answers", "tokens")
    command, worker_before = Command(stack, source, out), stack.pid("busy-a")

    def kill_the_worker() -> None:
        had = out.stat().st_size
        stack.until(lambda: out.stat().st_size > had)
        stack.kill("busy-a")

    plan = moments(SEED)
    statuses = [command.killed(moment) for moment in plan[:5]]
    statuses += [command.killed(Moment(signal.SIGKILL), kill_the_worker)]
    statuses += [command.killed(Moment(signal.SIGINT, "asked"))]  # what waits for another worker is asked again
    statuses += [command.killed(moment) for moment in plan[5:]]
    assert set(statuses) <= {-signal.SIGKILL, -signal.SIGINT, 130}, "a run came to its end before it was killed"
    facts = json.loads(stack.command(*command.arguments).stdout)
    assert (facts["lines"], facts["done"], facts["failed"], facts["left"]) == (LINES, LINES, 0, 0)
    told = Told.of(mark)
    assert_whole(out, told)
    assert_asked_and_computed_once(told)
    assert told.repeats or any(times > 1 for times in told.started.values()), "no kill met anything that was under way"
    stack.until_restarted("busy-a", worker_before)
    before = out.read_bytes()
    assert json.loads(stack.command(*command.arguments).stdout)["done"] == LINES
    assert (out.read_bytes(), Told.of(mark).repeats) == (before, told.repeats)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]
