"""`headrace batch run`: a file of requests straight to the log, and their answers into a file. It goes on where it was cut off."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, data_dir, kafka_settings, print_json, quiet_logs
from cli.registry import Models, now_ms, read_models
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import BATCH

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from cli.batch_files import Checked, JobFiles
    from cli.batch_lines import Asking
    from decisions.jobs import Job
    from infra.settings import KafkaSettings

SILENCE_S = 60.0
"""After so long without an answer it is said where to look."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
SOME_FAILED, BAD_INPUT = 1, 2
_IN = click.Path(path_type=Path, dir_okay=False, exists=True)
_OUT = click.Path(path_type=Path, dir_okay=False)


@click.group()
def batch() -> None:
    """Many requests from a file, straight through the log."""


@batch.command()
@click.argument("source", metavar="IN.jsonl", type=_IN)
@click.argument("out", metavar="OUT.jsonl", type=_OUT)
@click.option("--model", help="The model that all lines are asked of (default: the one that each line names).")
@click.option("--ordered", is_flag=True, help="Write answers in the order of the input; else as they come.")
@click.option(
    "--skip-bad",
    is_flag=True,
    help="Write an error for each line that can't be asked, or has an earlier one's id; else nothing is asked.",
)
@click.option("--new", is_flag=True, help="Begin anew, and overwrite the output; else a job that was cut off goes on.")
@click.option("--top-k", type=click.IntRange(1), help="Of plain lines for a classifier: how many classes.")
@click.option("--dimensions", type=click.IntRange(1), help="Of plain lines for embeddings: how many numbers.")
@click.option("--encoding-format", type=click.Choice(["float", "base64"]), help="Of plain lines for embeddings.")
@click.option("--tenant", default="default", show_default=True, help="Whose requests these are.")
@click.option("--grant", "grant_file", type=_IN, help="A file with what `headrace tenants grant NAME --json` printed.")
@click.option(
    "--window", type=click.IntRange(1, 100_000), default=1_024, show_default=True, help="Requests at once in the log."
)
@click.option("--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as JSON.")
def run(
    source: Path,
    out: Path,
    model: str | None,
    ordered: bool,
    skip_bad: bool,
    new: bool,
    top_k: int | None,
    dimensions: int | None,
    encoding_format: str | None,
    tenant: str,
    grant_file: Path | None,
    window: int,
    quiet: bool,
    as_json: bool,
) -> int:
    """Ask all lines of IN.jsonl and write the answers to OUT.jsonl.

    A line is one of OpenAI's batches ({"custom_id", "method", "url", "body"}: chat completions, completions, embeddings, classifications) or, for a
    model that embeds or classifies, {"text": …} or {"base64": …} with an "id" if it likes. Answers have the form of OpenAI's batches. After Ctrl-C, or worse,
    the same command goes on where it was and asks nothing twice. Once all is done, it asks again the lines whose error may pass, and those alone.
    """
    wishes = {"top_k": top_k, "dimensions": dimensions, "encoding_format": encoding_format}
    options = {"model": model, "wishes": {name: value for name, value in wishes.items() if value is not None}}
    quiet_logs()
    work = _Work(source, out, options, ordered, skip_bad, new, tenant, grant_file, window, _Display(quiet), as_json)
    return asyncio.run(work.run())


class Served:
    """What the registry holds, as the front door asks for it, and in `found` what was asked for and is there.

    A job that goes on asks for what it found when it was begun, and nothing else is there: lines are gathered by what their models take.
    A new one doesn't find what isn't served to batch jobs.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._stable: Mapping[str, str] = models.stable
        self._pinned = False
        self.found: dict[str, tuple[str, str]] = {}

    def pin(self, job: Job) -> None:
        """Stand where the job was begun. Raises HeadraceError (conflict) if that can't be."""
        from decisions.jobs import unlike

        if (why := unlike(job.served, self._models.versions)) is not None:
            raise HeadraceError(Reason.CONFLICT, f"this job can't go on: {why}; say --new to begin anew")
        self._stable = {model: version for model, (version, _) in job.served.items()}
        self._pinned = True

    def resolve(self, model: str) -> ModelVersionRegistered | None:
        """The version that a model's name stands for. Raises HeadraceError (model_not_found) if it isn't served on the tier `batch`."""
        from decisions.admission import not_on_tier
        from decisions.jobs import form_of

        version = self._models.versions.get((model, self._stable.get(model, "")))
        if version is not None and BATCH not in version.tiers and not self._pinned:
            refusal = not_on_tier(model, BATCH)
            raise HeadraceError(refusal.reason, refusal.message, param=refusal.param)
        if version is not None and model not in self.found:
            self.found[model] = (version.version, form_of(version))
        return version

    def all(self) -> list[ModelVersionRegistered]:
        """Every model's, for messages."""
        versions, stable = self._models.versions, self._models.stable
        found = (versions.get((model, stable[model])) for model in sorted(stable))
        return [version for version in found if version is not None]


@dataclass(slots=True)
class _Display:
    """A progress bar on standard error, where that is a terminal."""

    quiet: bool
    progress: Progress | None = None
    task: TaskID | None = None
    heard_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def showing(self, what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
        """Shows how much of `total` is done, as it is told."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        out = console(stderr=True)
        if self.quiet or not out.is_terminal:
            yield lambda _done: None
            return
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=out) as progress:
            task = progress.add_task(what, total=total or None, completed=done, rate="")

            def tell(now: int) -> None:
                speed = progress.tasks[0].speed
                progress.update(task, completed=now, rate=f"{speed:.1f}/s" if speed else "")

            yield tell


@dataclass(slots=True)
class _Work:
    """One call of the command."""

    source: Path
    out: Path
    options: dict[str, Any]
    ordered: bool
    skip_bad: bool
    new: bool
    tenant: str
    grant_file: Path | None
    window: int
    display: _Display
    as_json: bool

    async def run(self) -> int:
        from cli.batch_files import JobFiles, check_files
        from cli.batch_lines import Asking

        check_files(self.source, self.out)
        settings = kafka_settings()
        served = Served(await read_models(settings))
        asking = Asking(served, self.options["model"], self.options["wishes"])
        files = JobFiles(self.out)
        files.open()
        try:
            job = None if self.new else files.load()
            if job is None:
                checked = await self._check(asking)
                job = self._begin(checked, served, files)
                if job is None:
                    return BAD_INPUT
                asking = replace(asking, repeats=checked.repeats)
            else:
                await self._check_same(job)
                await asyncio.to_thread(files.begin, job)
                await asyncio.to_thread(self._count_reasons, job, files)
                again = await asyncio.to_thread(self._again, job, files)
                if again is None:
                    return self._tell(job, 0.0, 0, None)
                job = again
                served.pin(job)
                asking = replace(asking, prompts=job.prompts)
                if job.repeats:
                    asking = replace(asking, repeats=(await self._check(asking)).repeats)
            return await self._go(job, asking, files)
        finally:
            files.close()

    def _again(self, job: Job, files: JobFiles) -> Job | None:
        """The job that goes on; None if there is nothing left to ask."""
        from cli.batch_again import begin_again

        if not job.finished:
            return job
        self._put_in_order(job, files)
        return begin_again(files, job, now_ms())

    def _count_reasons(self, job: Job, files: JobFiles) -> None:
        from cli.batch_again import count_reasons

        count_reasons(files, job)

    def _put_in_order(self, job: Job, files: JobFiles) -> None:
        from cli.batch_again import put_in_order

        if self.ordered and job.finished:
            put_in_order(files, job, self.source)

    async def _check(self, asking: Asking) -> Checked:
        from cli.batch_files import check

        with self.display.showing("checking", 0) as tell:
            return await check(self.source, asking, tell)

    def _begin(self, checked: Checked, served: Served, files: JobFiles) -> Job | None:
        """A new job, or None, and that is told, if its input can't be asked."""
        from decisions.jobs import Job

        if checked.bad and not self.skip_bad:
            self._tell_bad(checked)
            if not self.out.stat().st_size:
                self.out.unlink()
            return None
        files.begin(None)
        job = Job(now_ms(), secrets.token_hex(16), checked.digest, self.options, checked.lines, served.found)
        job.repeats = len(checked.repeats)
        files.save(job)
        return job

    def _tell_bad(self, checked: Checked) -> None:
        out = console(stderr=True)
        for number, text in checked.shown:
            out.print(f"{self.source}:{number}: {text}", markup=False)
        if (more := checked.bad - len(checked.shown)) > 0:
            out.print(f"… and {more} more", markup=False)
        text = f"{checked.bad} of {checked.lines} lines can't be asked, so nothing was: mend them, or say --skip-bad"
        out.print(f"headrace: {text}", markup=False, style="red")

    async def _check_same(self, job: Job) -> None:
        from cli.batch_files import digest_of

        if not job.input_digest:
            raise self._changed()
        if await asyncio.to_thread(digest_of, self.source) != job.input_digest:
            text = f"{self.source} isn't what it was when {self.out} was begun; say --new to begin anew"
            raise HeadraceError(Reason.CONFLICT, text)
        if job.options != self.options:
            text = f"{self.out} was begun with other options ({job.options}); give the same, or say --new to begin anew"
            raise HeadraceError(Reason.CONFLICT, text)

    async def _go(self, job: Job, asking: Asking, files: JobFiles) -> int:
        from cli.batch_files import read_lines
        from cli.batch_grant import Granted
        from cli.batch_run import Runner
        from infra.payloads import Payloads
        from infra.settings import ProcessSettings

        began_s, before = time.monotonic(), job.done + job.failed
        settings = kafka_settings()
        granted = Granted(settings, self.tenant, self.grant_file, data_dir())
        await self._claim(job, granted.tenant, settings)
        payloads = Payloads.of(ProcessSettings.from_env())
        with self.display.showing("asked", job.lines, before) as tell:

            def told() -> None:
                self.display.heard_s = time.monotonic()
                tell(job.done + job.failed)

            runner = Runner(
                job, files, settings, granted, payloads, window=self.window, ordered=self.ordered, told=told
            )
            digest = hashlib.sha256()
            stopped = await self._until_stopped(runner.run(read_lines(self.source, asking, digest, job.only)))
        if stopped is None and digest.hexdigest() != job.input_digest:
            job.input_digest = ""  # nor will they be, should it be put back
            files.save(job)
            raise self._changed()
        await asyncio.to_thread(self._put_in_order, job, files)
        return self._tell(job, time.monotonic() - began_s, job.done + job.failed - before, stopped)

    def _changed(self) -> HeadraceError:
        text = f"{self.source} was changed while its lines were asked, so answers may not be its own; say --new to begin anew"
        return HeadraceError(Reason.CONFLICT, text)

    async def _claim(self, job: Job, tenant: str, settings: KafkaSettings) -> None:
        """Nobody else's job, and no other log's: what it asked there wouldn't be found here."""
        from aiokafka.errors import KafkaError

        from infra.kafka import cluster_of, unreachable

        try:
            cluster = await cluster_of(settings)
        except (KafkaError, OSError) as error:
            raise HeadraceError(Reason.UNAVAILABLE, await unreachable(settings, error)) from error
        if (why := job.claim(tenant, cluster)) is not None:
            text = f"{self.out} can't go on: {why}; give the same, or say --new to begin anew"
            raise HeadraceError(Reason.CONFLICT, text)

    async def _until_stopped(self, work: Any) -> signal.Signals | None:
        """Runs it to its end, or to the first signal."""
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch(), name="watch")
        stopped: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            if len(stopped) == 1:  # a second doesn't stop it from noting what it did
                task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if not stopped:
                raise
            return stopped[0]
        finally:
            watch.cancel()
            for number in () if stopped else SIGNALS:  # nor from telling it
                loop.remove_signal_handler(number)
        return None

    async def _watch(self) -> None:
        """Says where to look when nothing is answered."""
        while True:
            await asyncio.sleep(SILENCE_S)
            if time.monotonic() - self.display.heard_s > SILENCE_S and not self.display.quiet:
                text = "nothing was answered for a minute: is its model served (`headrace status`)? Was something refused (`headrace dead-letters list`)?"
                console(stderr=True).print(f"headrace: {text}", markup=False, style="dim")
                self.display.heard_s = time.monotonic()

    def _tell(self, job: Job, took_s: float, now: int, stopped: signal.Signals | None) -> int:
        rate = now / took_s if took_s > 0 else 0.0
        left = job.lines - job.done - job.failed
        reasons = dict(sorted(job.reasons.items(), key=lambda each: (-each[1], each[0])))
        if self.as_json:
            facts = {"lines": job.lines, "done": job.done, "failed": job.failed, "reasons": reasons, "left": left}
            print_json({**facts, "seconds": round(took_s, 3), "lines_per_s": round(rate, 3), "out": str(self.out)})
        else:
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            parts = [f"{job.lines} lines: {job.done} done, {job.failed} failed{f' ({why})' if why else ''}"]
            parts += [f"{left} left"] if left else []
            parts += [f"{now} in {took_s:.1f} s, {rate:.1f} lines/s"] if now else []
            click.echo(f"{', '.join(parts)}. {self.out}")
        if job.finished and job.may_pass and stopped is None:
            text = f"{job.may_pass} of those that failed may be answered yet; the same command asks them again: {_same_command()}"
            console(stderr=True).print(f"headrace: {text}", markup=False, soft_wrap=True)
        if stopped is not None:
            text = f"stopped; the same command goes on: {_same_command()}"
            console(stderr=True).print(f"headrace: {text}", markup=False)
            return STOPPED[stopped]
        return SOME_FAILED if job.failed or left else 0


def _same_command() -> str:
    """The command that goes on where this one was."""
    return shlex.join(["headrace", *(argument for argument in sys.argv[1:] if argument != "--new")])
