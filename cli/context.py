"""What commands share: where things are, an event loop for a coroutine, and plain or pretty output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infra.settings import KafkaSettings

PLAIN_WIDTH = 200
DEFAULT_URL = "http://127.0.0.1:8000"
T = TypeVar("T")


def data_dir() -> Path:
    """The data directory, absolute."""
    return Path(os.environ.get("HEADRACE_DATA") or ".headrace").absolute()


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where `headrace up` (process `pid`) serves: the front door's URL, Kafka's bootstrap, and each process's metrics."""

    pid: int
    url: str
    kafka: str
    metrics: dict[str, str]


def addresses_file(directory: Path) -> Path:
    """The file in which `headrace up` leaves its addresses for other commands."""
    return directory / "addresses.json"


def write_addresses(directory: Path, addresses: Addresses) -> None:
    """Makes the addresses known to other commands."""
    path = addresses_file(directory)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(asdict(addresses), indent=1))
    temporary.replace(path)


def read_addresses(directory: Path) -> Addresses | None:
    """The addresses of the `headrace up` that runs on this data directory; None if none does."""
    try:
        addresses = Addresses(**json.loads(addresses_file(directory).read_text()))
        os.kill(addresses.pid, 0)
    except PermissionError:
        return addresses
    except (OSError, ValueError, TypeError):
        return None
    return addresses


def use_running_kafka() -> None:
    """Lets the settings find the broker that `headrace up` runs, unless HEADRACE_KAFKA names one."""
    if not os.environ.get("HEADRACE_KAFKA") and (addresses := read_addresses(data_dir())) is not None:
        os.environ["HEADRACE_KAFKA"] = addresses.kafka


def kafka_settings() -> KafkaSettings:
    """The cluster that HEADRACE_KAFKA names, else the one that `headrace up` runs, else the default."""
    from infra.settings import KafkaSettings

    use_running_kafka()
    return KafkaSettings.from_env()


def front_door_url() -> str:
    """HEADRACE_URL, else the front door that `headrace up` runs, else the default."""
    running = read_addresses(data_dir())
    return (os.environ.get("HEADRACE_URL") or (running.url if running else DEFAULT_URL)).rstrip("/")


def default_key() -> str | None:
    """HEADRACE_API_KEY, else the key that `headrace up` made for the tenant `default`."""
    if key := os.environ.get("HEADRACE_API_KEY"):
        return key
    try:
        return key_file(data_dir()).read_text().strip() or None
    except OSError:
        return None


def key_file(directory: Path) -> Path:
    """Where `headrace up` keeps the key of the tenant `default`, readable by its owner alone."""
    return directory / "secrets" / "default.key"


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, with logs of errors on standard error."""
    quiet_logs()
    return asyncio.run(work)


def quiet_logs() -> None:
    """Keeps libraries' words, and warnings of junk in the log, out of a command's output: what it raises is one line, by `cli.main`."""
    import logging

    import structlog

    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def console(stderr: bool = False) -> Console:
    """A console; plain and wide when it is no terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; columns whose name starts with `>` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return made


def print_json(value: object) -> None:
    """One JSON document on one line, at once."""
    sys.stdout.write(json.dumps(value, separators=(", ", ": "), default=str, ensure_ascii=False) + "\n")
    sys.stdout.flush()
