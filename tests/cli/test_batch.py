"""Batch jobs on the real log, with a stand-in for admission, worker and endings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.main import cli
from cli.registry import add_key, new_key, new_tenant, write, write_tenant
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import ModelPromoted, ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import REGISTRY
from tests.cli.answering import Answering, asked_rows
from tests.small_models import rows_of, small_versions, vector

pytestmark = pytest.mark.kafka
ROOT = Path(__file__).parents[2]
SECRET = "batch-tests-grant-secret-0123456789abcdef"
CHAT, EMBED, CLASSIFY = "batch-chat", "batch-embed", "batch-classify"
FIXED = {"batch-ones-embed": 1, "batch-twos-embed": 2, "batch-apart-embed": 0}
"""Models that take so many rows at once, no more and no fewer, and one whose rows don't run together."""
WAIT_S = 30.0


@pytest.fixture(scope="module")
def models(kafka: KafkaSettings) -> None:
    versions = [ModelVersionRegistered(CHAT, "v1", "scripted", "", 4096), *small_versions("batch")]
    versions += [replace(versions[1], model=name, batched=False, fixed_rows=rows) for name, rows in FIXED.items()]
    events: list[Any] = [(version.model, version) for version in versions]
    events += [(version.model, ModelPromoted(version.model, version.version)) for version in versions]
    asyncio.run(write(kafka, REGISTRY, *events))


@pytest.fixture(scope="module")
def shared(kafka: KafkaSettings, models: None) -> Iterator[Answering]:
    name = f"batch-{secrets.token_hex(4)}"
    asyncio.run(write_tenant(kafka, add_key(new_tenant(name, 1), new_key(("batch",), 1)[1])))
    found = Answering(kafka, SECRET.encode(), name)
    yield found
    found.close()


@pytest.fixture
def answering(shared: Answering) -> Answering:
    shared.forget()
    return shared


@pytest.fixture
def tenant(kafka: KafkaSettings, shared: Answering, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("HEADRACE_KAFKA", kafka.bootstrap)
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HEADRACE_GRANT_SECRET", SECRET)
    return shared.tenant


class Job:
    """A job's files, and the command."""

    def __init__(self, folder: Path, tenant: str) -> None:
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self._tenant = tenant

    def write(self, *lines: Any) -> None:
        self.source.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))

    def arguments(self, *options: str) -> list[str]:
        return ["batch", "run", str(self.source), str(self.out), "--tenant", self._tenant, "--json", *options]

    def run(self, *options: str) -> Result:
        return CliRunner().invoke(cli, self.arguments(*options), standalone_mode=False)

    def start(self, *options: str, program: Sequence[str] = ("cli.main",)) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *program, *self.arguments(*options)]
        return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @property
    def answers(self) -> list[Any]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    @property
    def by_id(self) -> dict[str, Any]:
        found = {answer["custom_id"]: answer for answer in self.answers}
        assert len(found) == len(self.answers)
        return found


@pytest.fixture
def job(tmp_path: Path, tenant: str) -> Job:
    return Job(tmp_path, tenant)


def openai_line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.02)


def test_every_kind_of_line(job: Job, answering: Answering) -> None:
    job.write(
        openai_line("c", "/v1/chat/completions", model=CHAT, messages=[{"role": "user", "content": "hi"}], n=2),
        openai_line("p", "/v1/completions", model=CHAT, prompt=["one", "two"]),
        openai_line("e", "/v1/embeddings", model=EMBED, input=["ab", "c"], dimensions=2),
        "",
        openai_line("k", "/v1/classifications", model=CLASSIFY, input="abcd", top_k=2),
    )
    result = job.run()
    assert result.return_value == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["lines"], facts["done"], facts["failed"], facts["left"]) == (4, 4, 0, 0)
    found = job.by_id
    for answer in found.values():
        assert answer["id"] == f"batch_req_{answer['response']['request_id']}"
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
    bodies = {name: answer["response"]["body"] for name, answer in found.items()}
    assert [choice["message"]["content"] for choice in bodies["c"]["choices"]] == ["hi!", "hi!"]
    assert bodies["c"]["object"] == "chat.completion"
    assert [choice["text"] for choice in bodies["p"]["choices"]] == ["one!", "two!"]
    assert [item["embedding"] for item in bodies["e"]["data"]] == [vector(b"ab", 2), vector(b"c", 2)]
    assert bodies["e"]["usage"]["prompt_tokens"] == 3
    assert [each["label"] for each in bodies["k"]["data"][0]["classes"]] == ["middling", "long"]
    assert len(answering.requests) == 5


def test_plain_lines_travel_together_and_their_answers_part_again(job: Job, answering: Answering) -> None:
    texts = [f"text {number}" * (number % 3 + 1) for number in range(200)]
    job.write(*({"text": text, "id": f"n{number}"} for number, text in enumerate(texts)))
    result = job.run("--model", EMBED, "--ordered", "--dimensions", "3")
    assert result.return_value == 0, result.output
    assert len(answering.requests) == 4
    assert [answer["custom_id"] for answer in job.answers] == [f"n{number}" for number in range(200)]
    for text, answer in zip(texts, job.answers, strict=True):
        (item,) = answer["response"]["body"]["data"]
        assert item["embedding"] == pytest.approx(vector(text.encode(), 3))
    used = sum(answer["response"]["body"]["usage"]["prompt_tokens"] for answer in job.answers)
    assert used == sum(len(text) for text in texts)


@pytest.mark.parametrize("model", FIXED)
def test_a_model_whose_rows_do_not_run_together_gets_its_lines_one_by_one(
    job: Job, answering: Answering, model: str
) -> None:
    """For many together the deadline of one may be too short. A line that isn't of so many rows as the model takes is no line."""
    rows = FIXED[model] or 1
    job.write(*({"input": [f"text {number}"] * rows} for number in range(30)), {"input": ["odd"] * (rows + 1)})
    result = job.run("--model", model, "--skip-bad")
    bad = rows > 1
    assert result.return_value == int(bad), result.output
    assert [len(rows_of(request)) for request in answering.requests.values()] == [rows] * 30 + [2] * (not bad)
    assert len(job.by_id) == 31
    for number in range(30):
        items = job.by_id[f"line-{number + 1}"]["response"]["body"]["data"]
        assert [item["embedding"] for item in items] == [pytest.approx(vector(f"text {number}".encode()))] * rows
    if bad:
        assert "takes 2 items at a time, and 3 are given" in job.by_id["line-31"]["error"]["message"]


@pytest.mark.parametrize("reason", ["context_length_exceeded", "time_limit_exceeded"])
def test_one_line_at_fault_fails_alone_and_what_may_pass_is_asked_again(
    job: Job, answering: Answering, reason: str
) -> None:
    bad, later = json.dumps({"error": reason}), json.dumps({"once": "overloaded"})
    job.write({"text": "a"}, {"text": bad}, {"text": "b"}, {"text": later})
    result = job.run("--model", CLASSIFY)
    assert result.return_value == 1, result.output
    found = job.by_id
    assert sorted(found) == ["line-1", "line-2", "line-3", "line-4"]
    assert found["line-2"]["error"]["code"] == reason
    assert found["line-2"]["response"]["status_code"] == Reason(reason).http_status
    assert all(found[name]["error"] is None for name in ("line-1", "line-3", "line-4"))


def test_lines_whose_deadline_passed_together_are_asked_each_by_itself(job: Job, answering: Answering) -> None:
    late, never = json.dumps({"crowded": "deadline_exceeded"}), json.dumps({"error": "deadline_exceeded"})
    job.write({"text": "a"}, {"text": late}, {"text": never}, {"text": "b"})
    result = job.run("--model", EMBED, "--ordered")
    assert result.return_value == 1, result.output
    assert [answer["error"] and answer["error"]["code"] for answer in job.answers] == [
        None, None, "deadline_exceeded", None
    ]  # fmt: skip
    assert job.by_id["line-3"]["error"]["line"] == 3
    assert job.by_id["line-3"]["response"]["status_code"] == 504


@pytest.mark.parametrize("options", [(), ("--ordered",)], ids=["as they come", "ordered"])
@pytest.mark.parametrize("model", [CHAT, EMBED])
def test_run_again_a_job_asks_what_may_pass_and_no_more(
    job: Job, answering: Answering, model: str, options: tuple[str, ...]
) -> None:
    late = json.dumps({"for_now": "deadline_exceeded"})
    texts = ["a", late, "b", json.dumps({"error": "engine_error"}), late.replace(" ", "  "), "c"]
    job.write(*({"text": text} for text in texts))
    if model == CHAT:
        messages = [[{"role": "user", "content": text}] for text in texts]
        job.write(*(openai_line(f"line-{n + 1}", "/v1/chat/completions", messages=m) for n, m in enumerate(messages)))
    arguments = ("--model", model, *options)
    first = job.run(*arguments)
    told = json.loads(first.stdout)
    assert (first.return_value, told["failed"]) == (1, 3)
    assert told["reasons"] == {"deadline_exceeded": 2, "engine_error": 1}
    assert "2 of those that failed may be answered yet; the same command asks them again" in first.stderr
    asked = len(answering.requests)
    assert job.run(*arguments).return_value == 1, "they may fail again"
    assert {name for name, answer in job.by_id.items() if answer["error"]} == {"line-2", "line-4", "line-5"}
    again = [answering.requests[name] for name in list(answering.requests)[asked:]]
    rows = [row.decode() for request in again for row in asked_rows(request)]
    assert set(rows) == {texts[1], texts[4]}
    answering.trouble = False
    result = job.run(*arguments)
    told = json.loads(result.stdout)
    assert (result.return_value, told["lines"], told["done"], told["reasons"]) == (1, 6, 5, {"engine_error": 1})
    assert {name for name, answer in job.by_id.items() if answer["error"]} == {"line-4"}
    if options:
        assert list(job.by_id) == [f"line-{number}" for number in range(1, 7)]
    assert answering.computed == dict.fromkeys((text.encode() for text in texts if "error" not in text), 1)
    asked = len(answering.requests)
    assert job.run(*arguments).return_value == 1
    assert len(answering.requests) == asked


def test_a_request_that_failed_for_good_has_its_own_line(job: Job, answering: Answering) -> None:
    broken = json.dumps({"error": "engine_error"})
    job.write(
        openai_line("x", "/v1/chat/completions", model=CHAT, messages=[{"role": "user", "content": broken}]),
        openai_line("y", "/v1/chat/completions", model="gone", messages=[{"role": "user", "content": "hi"}]),
    )
    result = job.run("--model", CHAT)
    assert result.return_value == 1, "--model is asked whatever the lines name"
    assert job.by_id["x"]["response"]["body"]["error"]["code"] == "engine_error"
    assert job.by_id["y"]["response"]["body"]["model"] == CHAT


def test_bad_lines_are_told_before_anything_is_asked(job: Job, answering: Answering) -> None:
    job.write(
        openai_line("a", "/v1/embeddings", model=EMBED, input="ok"),
        "{not json",
        openai_line("b", "/v1/embeddings", model=CHAT, input="ok"),
        openai_line("a", "/v1/embeddings", model=EMBED, input="again"),
        openai_line("d", "/v1/audio", model=EMBED, input="ok"),
        openai_line("e", "/v1/chat/completions", model="gone", messages=[{"role": "user", "content": "hi"}]),
        openai_line("f", "/v1/completions", model=CLASSIFY, prompt="hi"),
    )
    result = job.run()
    assert result.return_value == 2
    told = ((2, "not JSON"), (3, "gives no embeddings"), (4, "line 1"), (5, "url must be"))
    for number, text in (*told, (6, "`gone` does not exist"), (7, "takes tensors")):
        assert any(f":{number}: " in line and text in line for line in result.stderr.splitlines()), result.stderr
    assert not answering.requests
    assert not job.out.exists()
    result = job.run("--skip-bad")
    assert result.return_value == 1
    assert [answer["error"]["line"] for answer in job.answers if answer["response"] is None] == [2, 3, 4, 5, 6, 7]
    assert len(job.answers) == 7
    (gone,) = (answer["error"] for answer in job.answers if answer["custom_id"] == "e")
    assert (gone["code"], gone["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("away", [False, True], ids=["at once", "when the log has forgotten what was asked"])
def test_a_killed_job_goes_on_and_asks_nothing_twice(job: Job, answering: Answering, away: bool) -> None:
    """The log recognises a repeat for a day: after that what was answered meanwhile isn't asked again at all."""
    texts = [f"t{number}" for number in range(700)]
    job.write(*({"text": text} for text in texts))
    answering.hold_after(3)
    process = job.start("--model", EMBED, "--window", "6")
    until(lambda: len(answering.requests) >= 6 and job.out.exists() and job.out.read_text().count("\n") >= 64)
    process.kill()
    process.communicate()
    answering.release()
    if away:
        until(lambda: answering.answered == len(answering.requests))
        answering.requests.clear()
    process = job.start("--model", EMBED, "--window", "6")
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert json.loads(output)["done"] == len(texts)
    assert sorted(job.by_id, key=lambda name: int(name.split("-")[1])) == [f"line-{n}" for n in range(1, 701)]
    assert answering.computed == dict.fromkeys((text.encode() for text in texts), 1)
    assert not away or set(answering.asked.values()) == {1}
    asked = len(answering.requests)
    again = job.run("--model", EMBED)
    assert again.return_value == 0
    assert len(answering.requests) == asked


@pytest.mark.parametrize("model", [CHAT, EMBED], ids=["each anew", "in parts"])
def test_what_was_asked_again_before_the_kill_is_not_waited_for_in_vain(
    job: Job, answering: Answering, model: str
) -> None:
    """The log answers an id once: the job that goes on must know each, wherever in `answers` the first's error stands."""
    script = {"once": "overloaded"} if model == CHAT else {"error": "context_length_exceeded"}
    contents = [json.dumps({**script, "number": number}) for number in range(40)]
    job.write(*({"text": text} for text in contents))
    if model == CHAT:
        messages = [[{"role": "user", "content": text}] for text in contents]
        job.write(*(openai_line(f"line-{n + 1}", "/v1/chat/completions", messages=m) for n, m in enumerate(messages)))
    heard = 79 if model == CHAT else 40
    process = job.start("--model", model, program=("tests.cli.batch_crash", "SIGKILL", "heard", str(heard)))
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    process = job.start("--model", model)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == (model == EMBED), errors
    assert len(job.by_id) == 40
    assert set(Counter(json.loads(row)["number"] for row in answering.computed).values()) <= {1}


def test_ctrl_c_says_how_to_go_on_and_answers_wait_in_the_log(job: Job, answering: Answering) -> None:
    job.write(*({"text": f"t{number}"} for number in range(300)))
    answering.hold_after(1)
    process = job.start("--model", EMBED)
    until(lambda: len(answering.requests) == 5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.005)
    process.send_signal(signal.SIGINT)  # as people do
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode in (130, -signal.SIGINT), errors  # the second may come when all is told
    assert "goes on: headrace batch run" in errors
    assert errors.count("\n") == 1
    assert json.loads(output)["left"] > 0
    answering.release()
    until(lambda: answering.answered == 5)
    result = job.run("--model", EMBED)
    assert result.return_value == 0, result.output
    assert len(job.by_id) == 300
    assert set(answering.asked.values()) == {1}, "what was answered meanwhile was asked again"


def test_a_job_goes_on_with_the_same_alone(job: Job, answering: Answering) -> None:
    job.write({"text": "a"})
    assert job.run("--model", EMBED).return_value == 0
    kept = json.loads(job.out.with_name("out.jsonl.job").read_text())
    assert (kept["tenant"], kept["asked"]) == (answering.tenant, 1)
    assert kept["cluster"]
    with_other = job.run("--model", CLASSIFY)
    assert isinstance(with_other.exception, HeadraceError)
    assert "other options" in with_other.exception.message
    job.write({"text": "b"})
    changed = job.run("--model", EMBED)
    assert isinstance(changed.exception, HeadraceError)
    assert "isn't what it was" in changed.exception.message
    assert job.run("--model", EMBED, "--new").return_value == 0
    job.out.with_name("out.jsonl.job").unlink()
    stranger = job.run("--model", EMBED)
    assert isinstance(stranger.exception, HeadraceError)
    assert "--new" in stranger.exception.message
    assert job.answers[0]["response"]["body"]["data"][0]["embedding"] == pytest.approx(vector(b"b"))


def test_without_a_secret_or_a_grant_it_says_what_to_give(
    job: Job, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_GRANT_SECRET")
    job.write({"text": "a"})
    found = job.run("--model", EMBED)
    assert isinstance(found.exception, HeadraceError)
    assert "--grant FILE" in found.exception.message
    assert not (Path(os.environ["HEADRACE_DATA"]) / "secrets").exists()


def test_a_grant_from_a_file_and_one_that_has_expired(job: Job, tenant: str, answering: Answering) -> None:
    given = CliRunner().invoke(cli, ["tenants", "grant", tenant, "--json"])
    file = job.source.with_name("grant.json")
    file.write_text(given.stdout)
    job.write({"text": "a"})
    assert job.run("--model", EMBED, "--grant", str(file)).return_value == 0
    file.write_text(json.dumps({**json.loads(given.stdout), "expires_ms": 1}))
    found = job.run("--model", EMBED, "--grant", str(file), "--new")
    assert isinstance(found.exception, HeadraceError)
    assert "headrace tenants grant" in found.exception.message


# --- what is shown meanwhile -------------------------------------------------------------------------------------------


def on_a_terminal(job: Job, *options: str) -> tuple[int, str, str]:
    """The command with a terminal for its standard error: its status, its standard output, and what the terminal showed, without colours."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while data := os.read(ours, 65_536):
                shown.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}
    command = [sys.executable, "-m", "cli.main", *job.arguments(*options)]
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=60)
    reader.join(WAIT_S)
    os.close(ours)
    return process.returncode, out, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(shown).decode())


def test_on_a_terminal_a_bar_tells_how_many_are_done_the_rate_and_the_time_left(job: Job, answering: Answering) -> None:
    job.write(*({"text": f"line {number}"} for number in range(640)))
    status, out, shown = on_a_terminal(job, "--model", EMBED, "--window", "1")
    assert status == 0, shown
    assert json.loads(out)["done"] == 640
    steps = [int(done) for done in re.findall(r"asked .*? (\d+)/640 ", shown)]
    assert steps == sorted(steps)
    assert steps[-1] == 640
    assert re.search(r"asked .*? \d+/640 +\d+\.\d/s +\d:\d\d:\d\d left \d:\d\d:\d\d", shown), shown


def test_elsewhere_there_is_none(job: Job, answering: Answering) -> None:
    job.write(*({"text": f"other {number}"} for number in range(64)))
    process = job.start("--model", EMBED)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["done"], error) == (0, 64, "")
    assert on_a_terminal(job, "--model", EMBED, "--new", "--quiet")[2] == ""
