"""`headrace bench`: runs one of the measurements in `bench/`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import pkgutil
import signal
from typing import Any

import click

from cli.context import run_async


def names() -> list[str]:
    """The benchmarks there are: the public modules of `bench` that can be run by name."""
    import bench as room

    return sorted(
        module.name
        for module in pkgutil.iter_modules(room.__path__)
        if not module.name.startswith("_") and _runs(module.name)
    )


def _runs(name: str) -> bool:
    """Whether the module has a `run`, judged from its text: importing it may be slow."""
    spec = importlib.util.find_spec(f"bench.{name}")
    source = (
        spec.loader.get_source(spec.name) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    )
    return source is not None and ("\ndef run(" in source or "\nasync def run(" in source)


class BenchCommand(click.Command):
    """Lists the benchmarks in its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The names, read from the room when help is asked for."""
        with formatter.section("Names"):
            formatter.write_text(", ".join(names()) or "none yet")


@click.command(cls=BenchCommand)
@click.argument("name", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON list of rows: metric, unit, at, ours, peer, theirs, ratio."
)
@click.option("--quick", is_flag=True, help="Make few calls: to see that it runs, not to measure.")
def bench(name: str | None, as_json: bool, quick: bool) -> Any:
    """Measure NAME, side by side with its peer in one run."""
    available = names()
    if name is None:
        click.echo("\n".join(available) or "There is no benchmark yet.")
        return 0
    if name not in available:
        raise click.UsageError(f"there is no benchmark {name!r}; there are: {', '.join(available) or 'none yet'}")
    # Both end a run in good order: what it started is stopped, and its directory goes.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    result = importlib.import_module(f"bench.{name}").run(as_json, quick=quick)
    return run_async(result) if inspect.iscoroutine(result) else result
