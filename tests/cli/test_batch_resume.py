"""What a batch job needs to go on, without a log."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from cli import batch_away, batch_files, batch_run
from cli.batch import Served, _Display, _Work
from cli.batch_files import JobFiles, check, read_lines
from cli.batch_flights import Flight
from cli.batch_lines import Asking, Line, outputs_of, read_line
from cli.main import cli
from decisions.jobs import SPLIT_PART, Job, Tries, gathered
from infra import payloads as payloads_module
from infra.objects import StoreAway
from infra.objects_folder import FolderStore
from infra.payloads import Payloads
from schemas.codec import encode
from schemas.errors import HeadraceError
from schemas.events import InferenceAnswered, ModelVersionRegistered, Tensor, Usage
from schemas.reasons import Reason
from schemas.topics import INLINE_MAX_BYTES
from tests.cli.batch_jobs import CLASSIFY, EMBED, asked, job_of, line, models, runner_of, write


async def test_a_job_keeps_what_its_lines_were_checked_with(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a", EMBED.model), line("b", "gone"), line("c", EMBED.model))
    served = Served(models(EMBED, CLASSIFY))
    job = await job_of(source, served)
    assert {model: version for model, (version, _) in job.served.items()} == {EMBED.model: EMBED.version}
    later = ModelVersionRegistered(EMBED.model, "v2", "scripted", "", 64)
    now = models(EMBED, later, ModelVersionRegistered("gone", "v1", "onnx", "", 64, processor=EMBED.processor))
    resumed = Served(now)
    resumed.pin(job)
    assert resumed.resolve(EMBED.model) == EMBED
    assert resumed.resolve("gone") is None, (
        "a line that was at fault is no other now: units would be cut in another way"
    )
    with pytest.raises(HeadraceError, match="is gone") as refused:
        Served(models(CLASSIFY)).pin(job)
    assert refused.value.reason is Reason.CONFLICT


async def test_a_job_whose_lines_are_gathered_in_another_way_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"text": str(number)} for number in range(70)))
    served = Served(models(EMBED))
    job = await job_of(source, served, EMBED.model)
    job.asked = 2
    job.written(0, 64)
    lines = read_lines(source, Asking(served, EMBED.model))
    ((unit, left),) = await runner_of(job, tmp_path / "out.jsonl")._missing(enumerate(gathered(lines, Line.weight)))
    assert (unit, [line.number for line in left]) == (1, list(range(65, 71)))
    with pytest.raises(HeadraceError, match="64 lines, and the input has 1 in their place") as refused:
        await runner_of(job, tmp_path / "out.jsonl").run(read_lines(source, Asking(Served(models()), EMBED.model)))
    assert refused.value.reason is Reason.CONFLICT
    assert not (tmp_path / "out.jsonl.job").exists()


@pytest.mark.parametrize(("source", "out"), [("a", "a"), ("a", "link"), ("b.job", "b"), ("b.job.new", "b")])
def test_an_input_is_never_written_over(tmp_path: Path, source: str, out: str) -> None:
    given = write(tmp_path / source, line("a", EMBED.model))
    if out == "link":
        (tmp_path / out).symlink_to(given)
    before = given.read_bytes()
    arguments = ["batch", "run", str(given), str(tmp_path / out), "--new"]
    found = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert isinstance(found.exception, HeadraceError)
    assert (found.exception.reason, "the input itself" in found.exception.message) == (Reason.CONFLICT, True)
    assert given.read_bytes() == before


@pytest.mark.parametrize("which", ["source", "out"])
def test_a_pipe_is_neither_read_nor_removed(tmp_path: Path, which: str) -> None:
    files = {name: write(tmp_path / name, "no line") for name in ("source", "out")}
    files[which].unlink()
    os.mkfifo(files[which])
    found = CliRunner().invoke(cli, ["batch", "run", *map(str, files.values()), "--new"], standalone_mode=False)
    assert isinstance(found.exception, HeadraceError)
    assert f"{files[which]} is a pipe or a device; name a file" in found.exception.message
    assert files[which].exists()


def test_a_full_disk_is_told_and_not_in_other_words_at_the_end(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "out")
    files._file = Path("/dev/full").open("r+b")  # noqa: SIM115 - `close` closes it
    job = Job(1, "seed", "", {}, 1)
    files.write(b"line\n", job)
    with pytest.raises(HeadraceError, match=r"No space left on device; once it can, run the same again"):
        files.save(job)
    assert not files.path.exists()
    files.close()


@pytest.mark.parametrize("outputs", [(), (Tensor("embedding", "FP32", (2, 1), bytes(8)),)])
def test_lines_that_failed_together_tell_why(tmp_path: Path, outputs: tuple[Tensor, ...]) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "a"}, {"text": "b"})
    lines = list(read_lines(source, Asking(Served(models(EMBED)), EMBED.model)))
    answer = InferenceAnswered(
        "r", "acme", EMBED.model, "v1", "batch", (), Usage(0, 0), "deadline_exceeded", "late", outputs=outputs
    )
    for text, good in outputs_of(lines, {0: answer}, False):
        told = json.loads(text)["error"]
        assert (good, told["code"], told["message"]) == (False, "deadline_exceeded", "late")


async def test_what_stopped_the_run_before_is_asked_again_and_stops_nothing(tmp_path: Path) -> None:
    runner, flight, error = asked(tmp_path, "a", "b")
    runner._broken = asyncio.get_running_loop().create_future()
    for reason in ("grant_expired", "overloaded", "invalid_api_key"):
        runner._answer(flight, 0, error(reason))
    assert runner.job.tries_of(0, 0) == Tries(3, 1)
    runner._answer(flight, 0, error("engine_error"))
    assert (flight.split, sorted(flight.requests)) == (True, [SPLIT_PART, SPLIT_PART + 1])
    assert (runner._again, runner._wait_until_s, runner._broken.done()) == (set(), 0.0, False)
    runner._replaying = False
    runner._answer(flight, SPLIT_PART, error("grant_expired", SPLIT_PART))
    with pytest.raises(HeadraceError, match="a grant that holds"):
        await runner._broken


class AwayStore(FolderStore):
    """Away so many times."""

    away = 0

    async def get(self, key: str, digest: str, size_bytes: int) -> bytes:
        if self.away > 0:
            self.away -= 1
            raise StoreAway("away")
        return await super().get(key, digest, size_bytes)


async def test_an_answer_in_a_store_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_away, "AWAY_POLL_S", 0.0)
    monkeypatch.setattr(payloads_module, "PROBE_S", 0.0)
    store = AwayStore(tmp_path / "objects")
    payloads = Payloads(store, patience_s=0.0)
    runner, flight, error = asked(tmp_path, "a", payloads=payloads)
    answer = replace(error("engine_error"), tenant="acme", error_message="x" * INLINE_MAX_BYTES)
    record: Any = SimpleNamespace(value=encode(await payloads.put(answer, None, "acme")), partition=3, offset=7)
    store.away = 9
    with monkeypatch.context() as impatient:
        impatient.setattr(batch_away, "AWAY_MAX_S", -1.0)
        with pytest.raises(HeadraceError, match="run the same again") as away:
            await runner._on_record(record)
    assert (away.value.reason, flight.answers) == (Reason.UNAVAILABLE, {})
    store.away = 3
    runner._files.open()
    await runner._on_record(record)
    assert (flight.places, store.away, runner.job.failed) == ({3: 7}, 0, 1)
    runner._files.close()
    await payloads.close()


async def test_what_waits_for_a_slow_unit_counts(tmp_path: Path) -> None:
    runner, head, error = asked(tmp_path, "a")
    asking = Asking(Served(models(EMBED)), EMBED.model)
    after = runner._register(1, [read_line(b'{"text": "b"}', 2, asking)])
    runner._files.open()
    runner._answer(after, 0, replace(error("engine_error"), error_message="x" * 10_000))
    assert runner._bytes == head.size_bytes + after.size_bytes
    assert after.size_bytes > 10_000
    assert not runner._is_open(after, 0)
    runner._answer(head, 0, error("engine_error"))
    assert (runner._bytes, runner._flights, runner.job.failed) == (0, {}, 2)
    runner._files.close()


async def test_a_run_that_ends_in_order_tells_what_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = asked(tmp_path, "a")
    sent: list[int] = []

    async def send(_producer: object, flight: Flight, _part: int) -> None:
        sent.append(flight.unit)

    monkeypatch.setattr(runner, "_send", send)
    monkeypatch.setattr(runner, "_save", lambda: None)
    unused: Any = None
    asking = Asking(Served(models(EMBED)), EMBED.model)
    lines = [read_line(b'{"text": "b"}', number, asking) for number in (2, 3)]
    await runner._ask_all(unused, iter([(1, lines[:1]), (2, lines[1:])]))
    assert sent == [0, 1, 2]
    assert (runner._asked, runner.job.asked) == (3, 1 + 256)


class Changed:
    """A run during which the input changes."""

    def __init__(self, job: Job, source: Path) -> None:
        self.job, self.source = job, source

    async def run(self, lines: Iterator[Line]) -> None:
        with self.source.open("a") as file:
            file.write('{"text": "later"}\n')
        self.job.done = len(list(lines)) - 1


async def test_an_input_that_changes_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.jsonl", {"text": "a"}, {"text": "b"})
    served = Served(models(EMBED))
    job = await job_of(source, served, EMBED.model)
    monkeypatch.setenv("HEADRACE_GRANT_SECRET", "batch-tests-grant-secret-0123456789abcdef")
    monkeypatch.setattr(_Work, "_claim", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(batch_run, "Runner", lambda job, *_, **__: Changed(job, source))
    options: Any = {"model": EMBED.model, "wishes": {}}
    work = _Work(source, tmp_path / "out", options, False, False, False, "acme", None, 9, _Display(True), True)
    files, before = JobFiles(tmp_path / "out"), source.read_bytes()
    files.open()
    with pytest.raises(HeadraceError, match="was changed while"):
        await work._go(job, Asking(served, EMBED.model), files)
    files.close()
    source.write_bytes(before)
    kept = files.load()
    assert kept is not None
    with pytest.raises(
        HeadraceError, match="was changed while"
    ):  # the answers are no others when the input is put back
        await work._check_same(kept)


def test_lines_that_are_left_are_no_success(tmp_path: Path) -> None:
    path = tmp_path / "out"
    work = _Work(path, path, {}, False, False, False, "acme", None, 9, _Display(True), True)
    assert work._tell(Job(1, "seed", "", {}, 2, done=2), 1.0, 2, None) == 0
    assert work._tell(Job(1, "seed", "", {}, 2, done=1), 1.0, 1, None) == 1


async def test_a_repeated_id_is_asked_once(tmp_path: Path) -> None:
    names = ["a", "b", "a", "c", "a"]
    source = write(tmp_path / "in.jsonl", *(line(name, EMBED.model) for name in names))
    asking = Asking(Served(models(EMBED)))
    checked = await check(source, asking)
    assert (checked.bad, checked.repeats) == (2, {3: 1, 5: 1})
    again = list(read_lines(source, replace(asking, repeats=checked.repeats)))
    assert [each.number for each in again if each.fault is not None] == [3, 5]
    assert [len(each.requests) for each in again] == [1, 1, 0, 1, 0]
    assert "line 1, too" in str(again[2].fault)


async def test_an_id_is_noted_before_it_is_asked(tmp_path: Path) -> None:
    """The log answers it once: a run that goes on after a kill, and reads that answer before the error, must know it for its own."""
    runner, flight, error = asked(tmp_path, "a", "b")
    runner._files.open()
    runner._answer(flight, 0, error("overloaded"))
    noted: list[Job] = []

    async def send(*_: object, **__: object) -> asyncio.Future[None]:
        kept = JobFiles(tmp_path / "out.jsonl").load()
        assert kept is not None
        noted.append(kept)
        return asyncio.get_running_loop().create_future()

    async def header() -> bytes:
        return b""

    runner._granted.header = header  # type: ignore[method-assign]
    log: Any = SimpleNamespace(send=send)
    await runner._send(log, flight, 0)
    runner._answer(flight, 0, error("engine_error"))
    await runner._send(log, flight, SPLIT_PART)
    assert [(job.tries_of(0, 0), job.split) for job in noted] == [(Tries(1, 1), set()), (Tries(1, 1), {0})]
    for task in runner._again:
        task.cancel()
    runner._files.close()


async def test_a_long_check_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "PAUSE_LINES", 5)
    source = write(tmp_path / "in.jsonl", *({"text": str(number)} for number in range(50)))
    seen: list[int] = []
    checking = asyncio.create_task(check(source, Asking(Served(models(EMBED)), EMBED.model), seen.append))
    await asyncio.sleep(0)
    assert not checking.done()
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert seen == [5]


async def test_an_output_that_takes_nothing_stops_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, flight, error = asked(tmp_path, "a")
    runner._broken = asyncio.get_running_loop().create_future()

    def full(_lines: bytes, _job: Job) -> None:
        raise OSError("no space is left")

    monkeypatch.setattr(runner._files, "write", full)
    runner._answer(flight, 0, error("engine_error"))
    with pytest.raises(HeadraceError, match="no space is left; once it can, run the same again"):
        await runner._broken
    assert (runner.job.failed, runner._flights) == (0, {0: flight})
