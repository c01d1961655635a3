"""The entry point: finds the command's module, runs it, and turns an error into one clear line and an exit status."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import click

from schemas.errors import HeadraceError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("cli.up:up", "Start everything on this machine."),
    "status": ("cli.status:status", "What runs on this machine."),
    "chat": ("cli.chat:chat", "Talk to a model through the front door."),
    "classify": ("cli.small:classify", "Classify files or texts through the front door."),
    "embed": ("cli.small:embed", "Embed texts through the front door."),
    "batch": ("cli.batch:batch", "Run many requests, straight through the log."),
    "explain": ("cli.explain:explain", "One request's timeline, read back from the log."),
    "models": ("cli.models:models", "List, register and promote model versions."),
    "tenants": ("cli.tenants:tenants", "Tenants, their API keys, their quotas and their grants."),
    "dead-letters": ("cli.dead_letters:dead_letters", "Records that could not be handled: see, retry or drop them."),
    "topics": ("cli.topics:topics", "Create, list and follow the log's topics."),
    "bench": ("cli.bench:bench", "Measure, side by side with peers."),
    "bridge": ("cli.processes:bridge", "Run a front door (HTTP, SSE, WebSocket)."),
    "streams": ("cli.processes:streams", "Run a stream process: admission, endings or lifecycle."),
    "worker": ("cli.processes:worker", "Run a model server."),
}
FAILED, USAGE = 1, 2
_UNREACHABLE = ("KafkaConnectionError", "NodeNotReadyError", "KafkaTimeoutError")
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they run; the list of commands needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The commands, most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Imports the command, or None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The commands with their one-line help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace", prog_name="headrace")
@click.option("--data", metavar="DIR", help="The data directory (HEADRACE_DATA; default .headrace).")
@click.option(
    "--kafka", metavar="HOST:PORT", help="The Kafka cluster (HEADRACE_KAFKA; default: the one that `headrace up` runs)."
)
def cli(data: str | None, kafka: str | None) -> None:
    """Model serving through a log: every request, decision and token is a Kafka event."""
    if data:
        os.environ["HEADRACE_DATA"] = data
    if kafka:
        os.environ["HEADRACE_KAFKA"] = kafka


def main() -> None:
    """Runs the command line and exits: 0, 1 with the error as one line on standard error, 2 for wrong usage."""
    sys.exit(run(lambda: cli.main(standalone_mode=False)))


def run(command: Callable[[], object]) -> int:
    """The exit status of a command. `HEADRACE_DEBUG` lets errors through with their traceback."""
    try:
        result = command()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("HEADRACE_DEBUG"):
            raise
        click.echo(f"headrace: {describe(error)}", err=True)
        return FAILED
    return result if isinstance(result, int) else 0


def describe(error: Exception) -> str:
    """What went wrong, for a person."""
    cause = error.__cause__ if isinstance(error, HeadraceError) else error
    if (
        isinstance(cause, Exception)
        and type(cause).__name__ in _UNREACHABLE
        and type(cause).__module__.startswith("aiokafka")
    ):
        return _kafka_problem(cause)
    if isinstance(error, HeadraceError):
        return f"{error.param}: {error.message}" if error.param and error.param not in error.message else error.message
    if type(error).__module__.startswith("aiokafka"):
        return _kafka_problem(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error} (HEADRACE_DEBUG=1 shows where)"


def _kafka_problem(error: Exception) -> str:
    from cli.context import kafka_settings

    settings = kafka_settings()
    where = settings.bootstrap
    if type(error).__name__ in _UNREACHABLE:
        import asyncio

        from infra.kafka import refusal

        if (why := asyncio.run(refusal(settings))) is not None:
            return f"Kafka at {where} {why}"
        return f"Kafka at {where} can't be reached; start one with `headrace up`, or name another with HEADRACE_KAFKA"
    return f"Kafka at {where} refused: {str(error) or type(error).__name__}"


if __name__ == "__main__":
    main()
