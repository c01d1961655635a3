#!/usr/bin/env python3
"""Install Headrace into .venv, then run one of its commands. Needs nothing but this Python's standard library.

    python3 scripts/bootstrap.py --extras cpu,test -- pytest -q

`uv` comes from the package index into .bootstrap/; .venv gets a Python 3.11 or 3.12: this one, unless make says by PYTHON_ORIGIN=file that
nobody chose it and another is faster. A stamp in .venv remembers what was
installed from which constraints, so a later call goes straight to the command. All that is printed goes to standard
error: standard output belongs to the command.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BOOTSTRAP = ROOT / ".bootstrap"
LIBRARIES = ROOT / ".cache" / "lib"
STAMP = VENV / "headrace-install.json"
UV_REQUIREMENT = "uv==0.13.9"
VERSIONS = ((3, 12), (3, 11))
DOWNLOAD_VERSION = "3.12"
PROBE_TIMEOUT_S = 20
HEARTBEAT_S = 15
PR_SET_PDEATHSIG = 1
HEAVY_EXTRAS = {"cpu", "gpu"}


def say(text: str) -> None:
    print("headrace: " + text, file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    say(text)
    raise SystemExit(1)


def run_quietly(argv: Sequence[str], timeout_s: float | None = None, cwd: Path = ROOT) -> tuple[int, str]:
    """(exit status, output); 127 when the program can't be started at all."""
    try:
        done = subprocess.run(
            argv,
            cwd=str(cwd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout


# --- uv --------------------------------------------------------------------------------------------------------------


def bootstrap_uv() -> str:
    """The path of a working uv inside the checkout, installed by pip on the first call."""
    uv = BOOTSTRAP / "bin" / "uv"
    if run_quietly([str(uv), "--version"])[0] == 0:
        return str(uv)
    say("fetching uv, the installer, into .bootstrap/")
    shutil.rmtree(BOOTSTRAP, ignore_errors=True)
    status, venv_output = run_quietly([sys.executable, "-m", "venv", str(BOOTSTRAP)])
    if status == 0:
        pip = [str(BOOTSTRAP / "bin" / "python"), "-m", "pip", "install", "--quiet", UV_REQUIREMENT]
    else:  # Debian splits ensurepip off; its own pip can still install into a folder.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(BOOTSTRAP), UV_REQUIREMENT]
    status, pip_output = run_quietly(pip)
    if status == 0 and run_quietly([str(uv), "--version"])[0] == 0:
        return str(uv)
    found = shutil.which("uv")
    if found and run_quietly([found, "--version"])[0] == 0:
        say("using the uv on your PATH: " + found)
        return found
    if "ensurepip" in venv_output or "No module named" in venv_output + pip_output:
        fail(
            f"{sys.executable} can make no virtual environment and has no pip. Install Python's venv module and try again;\n"
            f"  on Debian or Ubuntu: apt-get install python3-venv   (or put uv on the PATH)"
        )
    fail("uv could not be installed; is the package index reachable? pip said:\n" + (pip_output or venv_output).strip())


# --- Python ----------------------------------------------------------------------------------------------------------


def version_of(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter that really runs, else None: a pyenv shim may exist and still fail."""
    probe = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    status, output = run_quietly([python, "-c", probe], PROBE_TIMEOUT_S)
    parts = output.split()
    if status != 0 or len(parts) != 3 or parts[0] != "cpython":
        return None
    return int(parts[1]), int(parts[2])


def candidates() -> Iterator[str]:
    yield sys.executable
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for version in VERSIONS:
        for folder in folders:
            path = Path(folder) / "python{}.{}".format(*version)
            if path.exists():
                yield str(path)
    for folder in folders:
        path = Path(folder) / "python3"
        if path.exists():
            yield str(path)


def is_optimised(python: str) -> bool:
    """Whether an interpreter was built with profile-guided optimisation, as distributions' own are: one compiled without it, as by pyenv, is a fifth slower."""
    probe = "import sys, sysconfig; print(sys.base_prefix, sysconfig.get_config_var('CONFIG_ARGS'))"
    status, output = run_quietly([python, "-c", probe], PROBE_TIMEOUT_S)
    return status == 0 and (output.startswith("/usr ") or "--enable-optimizations" in output)


def find_python(any_will_do: bool = False) -> str | None:
    """A CPython 3.11 or 3.12 on this machine, None when there is none: the one running first, or, if any will do, one that is optimised."""
    fitting = (python for python in candidates() if version_of(python) in VERSIONS)
    first = next(fitting, None)
    if first is None or not any_will_do or is_optimised(first):
        return first
    better = next((python for python in fitting if is_optimised(python)), None)
    if better is not None:
        say(f"using {better}: {first} was built without optimisation and is slower (PYTHON={first} insists on it)")
    return better or first


# --- the environment -------------------------------------------------------------------------------------------------


def fingerprint() -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "constraints-gpu.txt"):
        digest.update((ROOT / name).read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def read_stamp() -> tuple[str, set[str]]:
    try:
        stamp = json.loads(STAMP.read_text())
        return stamp["fingerprint"], set(stamp["extras"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", set()


def installed_gb() -> float:
    total = 0
    for folder, _, names in os.walk(VENV):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                pass
    return total / 1e9


def run_with_progress(argv: Sequence[str], env: dict[str, str], what: str) -> float:
    """Runs argv with its own output shown; adds a line each HEARTBEAT_S so that a silent minute isn't mistaken for a hang."""
    started = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            say(f"{what}: {time.monotonic() - started:.0f} s, {installed_gb():.1f} GB in .venv")

    threading.Thread(target=beat, daemon=True).start()
    try:
        status = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env, cwd=str(ROOT)).returncode
    finally:
        done.set()
    if status != 0:
        fail(
            f"{what} failed (exit {status}); the lines above say why. Run the same command again to go on where it stopped."
        )
    return time.monotonic() - started


def install(extras: set[str]) -> None:
    """Brings .venv to hold `extras` (and what it already held), or returns at once when it does."""
    fresh = fingerprint()
    stamped, present = read_stamp()
    if stamped == fresh and extras <= present and (VENV / "bin" / "python").exists():
        return
    if {"cpu", "gpu"} <= extras | present:
        fail("the cpu and gpu engines exclude each other; `make clean` first, then install the other")
    wanted = sorted(extras | present)
    if HEAVY_EXTRAS & set(wanted) and not HEAVY_EXTRAS & present:
        say(
            "first install: about 7 GB of packages (the model server is large); this takes minutes. Later runs skip it."
        )
    uv = bootstrap_uv()
    env = dict(os.environ, VIRTUAL_ENV=str(VENV))
    env.pop("PYTHONPATH", None)
    env.pop("PYTHONHOME", None)
    env.setdefault("UV_HTTP_TIMEOUT", "300")
    if not os.environ.get("UV_LINK_MODE"):
        env["UV_LINK_MODE"] = "hardlink" if same_filesystem(uv) else "copy"
    if version_of(str(VENV / "bin" / "python")) not in VERSIONS:
        python = find_python(any_will_do=os.environ.get("PYTHON_ORIGIN") == "file")
        if python:
            env["UV_PYTHON_DOWNLOADS"] = "never"
        else:
            say(f"no Python 3.11 or 3.12 on this machine: uv will fetch {DOWNLOAD_VERSION}")
        run_with_progress(
            [uv, "venv", "--quiet", "--clear", "--python", python or DOWNLOAD_VERSION, str(VENV)], env, "making .venv"
        )
    else:
        env["UV_PYTHON_DOWNLOADS"] = "never"
    target = ".[" + ",".join(wanted) + "]" if wanted else "."
    pins = "constraints-gpu.txt" if "gpu" in wanted else "constraints.txt"
    argv = [uv, "pip", "install", "--python", str(VENV / "bin" / "python"), "-e", target]
    argv += ["-c", pins, "--build-constraints", pins]
    took_s = run_with_progress(argv, env, "installing")
    STAMP.write_text(json.dumps({"fingerprint": fresh, "extras": wanted}))
    say(f"installed in {took_s:.0f} s")


def same_filesystem(uv: str) -> bool:
    """Whether uv's cache can be linked into .venv instead of copied."""
    status, output = run_quietly([uv, "cache", "dir"])
    folder = Path(output.strip()) if status == 0 and output.strip() else Path.home()
    while not folder.exists():
        folder = folder.parent
    return os.stat(str(folder)).st_dev == os.stat(str(ROOT)).st_dev


# --- the system library that vLLM's CPU kernels need ---------------------------------------------------------------------


def ensure_libnuma() -> None:
    """Makes libnuma.so.1 loadable: from the system, else out of its Debian package into the checkout."""
    if loads("libnuma.so.1") or (LIBRARIES / "libnuma.so.1").exists():
        return
    say("vLLM needs libnuma.so.1, which this machine lacks: taking it out of its Debian package into .cache/")
    scratch = LIBRARIES / "package"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if run_quietly(["apt-get", "download", "libnuma1"], cwd=scratch)[0] != 0 and os.geteuid() == 0:
        run_quietly(["apt-get", "update"])
        run_quietly(["apt-get", "download", "libnuma1"], cwd=scratch)
    for package in scratch.glob("libnuma1_*.deb"):
        run_quietly(["dpkg-deb", "-x", str(package), str(scratch)])
    for library in scratch.rglob("libnuma.so.1"):
        shutil.copy(library, LIBRARIES / "libnuma.so.1")
    shutil.rmtree(scratch)
    if not (LIBRARIES / "libnuma.so.1").exists():
        fail(
            "vLLM needs the system library libnuma.so.1. Install it and try again:\n"
            "  apt-get install libnuma1  |  dnf install numactl-libs  |  pacman -S numactl  |  zypper install libnuma1"
        )


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- the command -----------------------------------------------------------------------------------------------------


def execute(command: Sequence[str]) -> NoReturn:
    """Becomes the command. It is told to stop if make dies without passing a signal on."""
    program = VENV / "bin" / command[0]
    if not program.exists():
        fail(f"{command[0]} is not installed in .venv; remove .venv/{STAMP.name} and try again")
    if command[0] != "headrace":  # headrace tells its user what to type, so it must see the user's own PATH
        os.environ["PATH"] = str(VENV / "bin") + os.pathsep + os.environ.get("PATH", "")
    os.environ["VIRTUAL_ENV"] = str(VENV)
    if (LIBRARIES / "libnuma.so.1").exists():
        paths = [str(LIBRARIES), os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    os.environ.pop("PYTHONHOME", None)
    parent = os.getppid()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (AttributeError, OSError):
        pass  # Not Linux: the terminal's Ctrl-C still reaches the command.
    if os.getppid() != parent:
        raise SystemExit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(str(program), [str(program), *command[1:]])


def parse(argv: list[str]) -> tuple[set[str], list[str]]:
    options, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    if len(options) != 2 or options[0] != "--extras":
        fail("usage: bootstrap.py --extras NAME[,NAME] [-- COMMAND [ARG]...]")
    return {name for name in options[1].split(",") if name}, command


def main() -> None:
    if sys.version_info < (3, 11):
        fail("Python 3.11 or newer is needed; {} is {}.{}".format(sys.executable, *sys.version_info[:2]))
    extras, command = parse(sys.argv[1:])
    try:
        with open(ROOT / "pyproject.toml") as lock:  # Two makes at once: the second waits for the first.
            fcntl.flock(lock, fcntl.LOCK_EX)
            install(extras)
            if "cpu" in extras:
                ensure_libnuma()
    except KeyboardInterrupt:
        fail("stopped; run the same command again to go on")
    if command:
        execute(command)


if __name__ == "__main__":
    main()
