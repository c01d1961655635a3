"""Batch jobs on the whole path: real processes, a real ONNX model, and a job that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.models import register_versions, version_of
from infra.models_file import ModelEntry
from tests.system.fixtures_models import worker
from tests.system.running import COMMAND_WAIT_S, MODEL, ROOT, RunningStack

MAGIKA = "magika"
SOURCES = ("import os\n\nfor name in os.listdir():\n    print(name)\n" * 4, '{"a": [1, 2, 3], "b": null}\n' * 9)


@pytest.fixture(scope="module")
def magika(stack: RunningStack) -> Iterator[str]:
    """The classifier of files, out of its package, and one worker."""
    entry = ModelEntry(MAGIKA, "1", "onnx", "package:magika", 512, slots=64, processor="bytes-classification")
    version = version_of(entry, stack.data_dir, lambda _text: None)
    stack.thread.run(register_versions(stack.kafka, [version]))
    with worker(stack, "magika-a", MAGIKA):
        yield MAGIKA


def answers(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_a_file_of_several_kinds(stack: RunningStack, magika: str, tmp_path: Path) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "mill"}]}
    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "file", "url": "/v1/classifications", "body": {"model": magika, "input": SOURCES[0], "top_k": 2}},
        {"custom_id": "gone", "url": "/v1/completions", "body": {"model": "gone", "prompt": "x"}},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    arguments = ("batch", "run", str(source), str(out), "--tenant", "acme", "--json")
    refused = stack.command(*arguments, check=False)
    assert (refused.returncode, out.exists()) == (2, False)
    assert "The model `gone` does not exist" in refused.stderr
    done = stack.command(*arguments, "--skip-bad", check=False)
    assert (done.returncode, done.stderr) == (1, "")
    found = answers(out)
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "mill"
    (item,) = found["file"]["response"]["body"]["data"]
    assert (item["label"], len(item["classes"])) == ("python", 2)
    assert (found["gone"]["response"], found["gone"]["error"]["code"]) == (None, "model_not_found")
    request_id = found["file"]["response"]["request_id"]
    assert [record.topic for record in stack.events(request_id, "InferenceRequested")] == ["requests.batch"]


def test_a_killed_job_goes_on_and_each_of_its_requests_is_admitted_once(
    stack: RunningStack, magika: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{json.dumps({'text': SOURCES[n % 2]})}\n" for n in range(1_600)))
    arguments = ("batch", "run", str(source), str(out), "--model", magika, "--tenant", "acme", "--json")
    argv = [sys.executable, "-m", "cli.main", *arguments, "--window", "4"]
    process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **stack.env})
    stack.until(lambda: out.exists() and out.stat().st_size)
    process.kill()
    process.wait(COMMAND_WAIT_S)
    facts = json.loads(stack.command(*arguments, "--ordered").stdout)
    assert (facts["done"], facts["failed"]) == (1_600, 0)
    found = answers(out)
    for number in range(1_600):
        (item,) = found[f"line-{number + 1}"]["response"]["body"]["data"]
        assert item["label"] in (("python",), ("json", "jsonl"))[number % 2]
    requests = {line["response"]["request_id"] for line in found.values()}
    assert len(requests) == 25
    for request_id in sorted(requests)[:8]:
        assert len(stack.events(request_id, "InferenceAdmitted", "lifecycle")) == 1
