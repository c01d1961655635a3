"""The output of a batch job that is asked again: the old one or the new one, whenever it is cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.batch import Served, _Display, _Work
from cli.batch_again import begin_again
from cli.batch_files import JobFiles, read_lines
from cli.batch_lines import Asking, failed
from decisions.jobs import Job
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from tests.cli.batch_jobs import goes_on, models, write


def failing(tmp_path: Path) -> tuple[JobFiles, Job]:
    """A finished job: an answer, an error that may pass, and one that won't."""
    files = JobFiles(tmp_path / "out.jsonl")
    lines = list(
        read_lines(write(tmp_path / "in.jsonl", *({"text": text} for text in "abc")), Asking(Served(models())))
    )
    errors = [HeadraceError(reason, "so") for reason in (Reason.DEADLINE_EXCEEDED, Reason.ENGINE_ERROR)]
    shown = [failed(line, error, "r")[0] for line, error in zip(lines[1:], errors, strict=True)]
    job = Job(1, "seed", "", {}, 3)
    files.open()
    files.begin(None)
    files.write(b'{"custom_id":"line-1","error":null}\n' + b"".join(shown), job)
    job.written(0, 1, ["deadline_exceeded", "engine_error"])
    files.save(job)
    files.close()
    return files, job


@pytest.mark.parametrize("step", ["save", "_put_in_place"], ids=["it is told of", "it takes its place"])
def test_an_output_written_anew_is_the_old_or_the_new_one_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException): ...

    def killed(*_: object) -> None:
        raise Killed

    files, job = failing(tmp_path)
    before = files.out.read_bytes()
    files.open()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(JobFiles, step, killed)
        begin_again(files, job, 2)
    files.close()
    assert files.out.read_bytes() == before
    found = goes_on(files)
    assert found.finished == (step == "save")
    if found.finished:
        assert files.out.read_bytes() == before
    else:
        assert (found.only, found.done, found.failed) == ([(2, 2)], 1, 1)
        assert [json.loads(line)["custom_id"] for line in files.out.read_bytes().splitlines()] == ["line-1", "line-3"]
        assert found.reasons == {"engine_error": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


@pytest.mark.parametrize("as_json", [False, True])
def test_why_lines_failed_is_told_also_of_a_job_of_an_earlier_build_which_did_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    files, job = failing(tmp_path)
    kept = json.loads(files.path.read_text())
    del kept["reasons"]
    files.path.write_text(json.dumps({**kept, "version": 5}))
    found = goes_on(files)
    assert not found.reasons
    work = _Work(files.out, files.out, {}, False, False, False, "acme", None, 9, _Display(True), as_json)
    work._count_reasons(found, files)
    assert found.reasons == job.reasons
    found.written(1, 0, ["engine_error"])
    found.lines = 4
    work._tell(found, 0.0, 0, None)
    told = capsys.readouterr().out
    if as_json:
        assert list(json.loads(told)["reasons"].items()) == [("engine_error", 2), ("deadline_exceeded", 1)]
    else:
        assert "4 lines: 1 done, 3 failed (2 engine_error, 1 deadline_exceeded). " in told


def test_what_was_put_behind_the_output_is_not_cut_off_by_asking_again(tmp_path: Path) -> None:
    files, job = failing(tmp_path)
    with files.out.open("ab") as file:
        file.write(b"mine\n")
    files.open()
    with pytest.raises(HeadraceError, match="put it elsewhere"):
        begin_again(files, job, 2)
    files.close()
    assert files.out.read_bytes().endswith(b"mine\n")
