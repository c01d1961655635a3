"""What else happens to a batch job's files than that it goes on."""

from __future__ import annotations

import fcntl
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.batch import _Display, _Work
from cli.batch_files import JobFiles
from decisions.jobs import Job
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from tests.cli.batch_jobs import goes_on


def begun(tmp_path: Path, lines: int = 3) -> tuple[JobFiles, Job]:
    """A job of three lines, of which two are in the output, and noted; the third is half there."""
    files, job = JobFiles(tmp_path / "out"), Job(1, "seed", "", {}, lines)
    files.open()
    files.begin(None)
    files.write(b"first\nsecond\n", job)
    job.done, job.asked = 2, 3
    files.save(job)
    assert files._file is not None
    files._file.write(b"thi")
    files.close()
    return JobFiles(tmp_path / "out"), job


def test_half_a_line_is_cut_and_what_is_whole_stays(tmp_path: Path) -> None:
    files, job = begun(tmp_path)
    assert goes_on(files) == job
    assert files.out.read_bytes() == b"first\nsecond\n"
    files.open()
    files.begin(job)
    files.write(b"third\n", job)
    files.save(job)
    files.close()
    assert goes_on(files).out_bytes == len(files.out.read_bytes()) == len(b"first\nsecond\nthird\n")


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (b"", "is shorter"),
        (b"first\nsec", "is shorter"),
        (b"second\nfirst\nthird\n", "isn't what the job wrote"),
        (b"first\nthird\nsecond\n", "isn't what the job wrote"),
    ],
)
def test_an_output_that_was_changed_by_hand_is_refused_and_left_alone(tmp_path: Path, now: bytes, why: str) -> None:
    files, _ = begun(tmp_path)
    kept = files.path.read_bytes()
    files.out.write_bytes(now)
    with pytest.raises(HeadraceError, match=f"{why}.* say --new to begin anew") as refused:
        goes_on(files)
    assert refused.value.reason is Reason.CONFLICT
    assert (files.out.read_bytes(), files.path.read_bytes()) == (now, kept)


def test_what_was_put_behind_a_finished_jobs_output_stays(tmp_path: Path) -> None:
    files, _ = begun(tmp_path, lines=2)
    files.out.write_bytes(b"first\nsecond\nmine\n")
    assert goes_on(files).finished
    assert files.out.read_bytes() == b"first\nsecond\nmine\n"


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_an_output_that_is_taken_away_meanwhile_is_told_and_noted_nowhere(tmp_path: Path, how: str) -> None:
    files, job = begun(tmp_path)
    kept = files.path.read_bytes()
    files.open()
    files.begin(job)
    elsewhere = files.out.rename(tmp_path / "elsewhere")
    if how == "removed":
        elsewhere.unlink()
    if how == "replaced":
        files.out.write_bytes(elsewhere.read_bytes())
    files.write(b"third\n", job)
    with pytest.raises(HeadraceError, match="was moved or removed meanwhile; put it back to go on") as told:
        files.save(job)
    files.close()
    assert (told.value.reason, files.path.read_bytes()) == (Reason.CONFLICT, kept)
    if how == "moved":
        elsewhere.rename(files.out)
        assert goes_on(files).done == 2


def test_two_runs_at_once_and_one_whose_output_the_other_has_just_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = begun(tmp_path)
    files.open()
    with pytest.raises(HeadraceError, match="another process works on"):
        JobFiles(files.out).open()
    files.close()
    locking = fcntl.flock

    def removed_before(*arguments: Any) -> None:
        monkeypatch.undo()
        files.out.unlink()
        locking(*arguments)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    files.open()
    assert files.out.exists()
    with pytest.raises(HeadraceError, match="another process works on"):
        JobFiles(files.out).open()
    files.close()


def test_how_to_go_on_is_not_how_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["headrace", "batch", "run", "in", "out", "--new", "--model", "m"])
    work = _Work(path, path, {}, False, False, True, "acme", None, 9, _Display(True), True)
    assert work._tell(Job(1, "seed", "", {}, 2, done=1), 1.0, 1, signal.SIGINT) == 130
    assert "goes on: headrace batch run in out --model m\n" in capsys.readouterr().err
