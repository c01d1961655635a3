"""Headrace against `vllm serve`: what Kafka and everything around it cost a real language model.

Both serve the same weights with the same engine arguments on the same cores, and get the same load: 64 tokens in, 64 out to the end
(`ignore_eos`), greedy, each prompt different from its first token on, so that no prefix cache serves. They never run at the same time:
the peer is measured before and after ours (`vllm`, ours, ours, `vllm`), so that a drift of the machine touches both alike, and is stopped
by SIGSTOP in between, so that it takes no time from us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson

from bench.load import Client, Result, closed_loop, pooled
from bench.rows import Row, conditions, row, show
from bench.stack import private_stack
from cli.context import console, data_dir
from infra.artifacts import ensure_demo_model
from infra.models_file import ModelEntry, default_models
from infra.ports import free_port
from infra.supervisor import ChildFailed, ChildSpec, Supervisor

PEER = "vllm serve"
CALLS = {1: 6, 8: 32, 32: 96}
"""Calls a pass, by concurrency."""
QUICK_CALLS = {1: 2, 8: 8, 32: 32}
PASSES, QUICK_PASSES = 2, 1
TOKENS_IN = TOKENS_OUT = 64
PEER_READY_S = 300.0
PEER_POLL_S = 0.5
AIM_RATIO = 0.95
VLLM_VERSION = "0.32.0+cpu"
ENV = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else vLLM leaves one core of two to others
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_TEXT = (
    "The headrace is the channel that leads the water of a river from the weir to the mill, and the tailrace leads it back again when "
    "the wheel has taken its share of the work. Whoever builds one must know how the river rises in spring, how the ice breaks, and how "
    "much the neighbours further down may claim in a dry summer, for the law of water is older than the law of the land. "
)

Passes = dict[int, list[Result]]
"""The results by concurrency, one a pass."""


@dataclass(slots=True)
class Peer:
    """A running `vllm serve`. `pid` leads its process group."""

    url: str
    pid: int

    def pause(self) -> None:
        """Takes it off the cores."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Puts it back."""
        os.killpg(self.pid, signal.SIGCONT)


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. `quick` makes one short pass each. Raises HeadraceError if a call fails or a side doesn't come up."""
    out = console(stderr=True)
    before = conditions()
    folder = ensure_demo_model(data_dir(), out.print)
    entry = _entry(folder)
    calls, passes = (QUICK_CALLS, QUICK_PASSES) if quick else (CALLS, PASSES)
    bodies = Bodies(entry.name, folder)
    ours: Passes = {at: [] for at in calls}
    theirs: Passes = {at: [] for at in calls}

    async def measure(into: Passes, url: str, key: str | None, who: str) -> None:
        async with Client(f"{url}/v1/completions", key) as client:
            await _pass(client, bodies, calls, into, lambda line: out.print(f"headrace: {who}: {line}"))

    async with vllm_serve(entry, folder) as peer:
        await measure(theirs, peer.url, None, PEER)
        peer.pause()
        try:
            async with private_stack((entry,), ENV) as stack:
                for _ in range(passes):
                    await measure(ours, stack.url, stack.key, "headrace")
        finally:
            peer.go_on()
        if passes > 1:
            await measure(theirs, peer.url, None, PEER)
    show(_rows(ours, theirs), as_json=as_json, title=f"SmolLM2, {TOKENS_IN} tokens in, {TOKENS_OUT} out ({before})")
    _judge(ours, theirs)
    return 0


def _entry(folder: Path) -> ModelEntry:
    """The demo's model, with as many slots as the highest concurrency."""
    first = default_models()[0]
    return ModelEntry(
        first.name,
        first.version,
        first.engine,
        str(folder),
        first.context_length,
        slots=max(CALLS),
        engine_args=first.engine_args,
    )


class Bodies:
    """Call bodies of exactly `TOKENS_IN` prompt tokens, no two of them alike."""

    def __init__(self, model: str, folder: Path) -> None:
        """Reads the model's tokenizer."""
        from tokenizers import Tokenizer

        self._model = model
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._number = 0

    def next(self, _: int) -> bytes:
        """One more; it differs from the others from its first words on."""
        self._number += 1
        at = self._number * 7 % len(_TEXT)
        text = f"{self._number * 7919 % 100_003} {_TEXT[at:]}{_TEXT}"
        body = {
            "model": self._model,
            "prompt": self._tokenizer.encode(text, add_special_tokens=False).ids[:TOKENS_IN],
            "max_tokens": TOKENS_OUT,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return orjson.dumps(body)


async def _pass(
    client: Client, bodies: Bodies, calls: dict[int, int], into: Passes, say: Callable[[str], None]
) -> None:
    """A warm-up at the highest concurrency, then each concurrency once."""
    warm = max(calls)
    (await closed_loop(client, warm, warm, bodies.next)).require_good()
    for concurrency, count in calls.items():
        result = (await closed_loop(client, concurrency, count, bodies.next)).require_good()
        if any(sample.tokens != TOKENS_OUT for sample in result.good):
            raise ChildFailed(f"an answer doesn't have {TOKENS_OUT} tokens, though ignore_eos was given")
        into[concurrency].append(result)
        say(f"concurrency {concurrency}: {result.tokens_per_s:.1f} tokens/s in {result.wall_s:.0f} s")


@contextlib.asynccontextmanager
async def vllm_serve(entry: ModelEntry, folder: Path) -> AsyncIterator[Peer]:
    """The peer, ready to serve `entry` by its name. Raises ChildFailed, with its last words, if it doesn't come up."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-vllm-", ignore_cleanup_errors=True) as scratch:
        port = free_port()
        argv = (sys.executable, "-m", "vllm.entrypoints.cli.main", *_arguments(entry, folder, port))
        env = {**ENV, "PYTHONPATH": os.pathsep.join((_dist_info(Path(scratch)), *filter(None, sys.path)))}
        async with Supervisor(Path(scratch)) as supervisor:
            began_s = time.monotonic()
            await supervisor.start(ChildSpec("vllm", argv, env, restart=False))
            url = f"http://127.0.0.1:{port}"
            pid = await _ready(supervisor, url)
            console(stderr=True).print(f"headrace: {PEER} is up after {time.monotonic() - began_s:.0f} s")
            yield Peer(url, pid)


def _arguments(entry: ModelEntry, folder: Path, port: int) -> list[str]:
    """`vllm serve`'s own arguments, equal to those that our worker gives the engine."""
    arguments = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", entry.name]
    arguments += ["--max-model-len", str(entry.context_length), "--max-num-seqs", str(entry.slots)]
    for name, value in entry.engine_args.items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, str(value)]
    return arguments


def _dist_info(scratch: Path) -> str:
    """A directory that tells Python's metadata which version of vllm this is: vllm-cpu's own names another distribution."""
    info = scratch / "path" / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")
    return str(info.parent)


async def _ready(supervisor: Supervisor, url: str) -> int:
    """Waits for /health; returns the pid."""
    give_up_at = time.monotonic() + PEER_READY_S
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        while True:
            status = supervisor.status()[0]
            if status.pid is None or time.monotonic() > give_up_at:
                words = "\n".join(status.log.read_text(errors="replace").splitlines()[-20:])
                raise ChildFailed(f"{PEER} didn't come up (exit status {status.exit_status}):\n{words}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return status.pid
            await asyncio.sleep(PEER_POLL_S)


def _rows(ours: Passes, theirs: Passes) -> list[Row]:
    rows = []
    for at in ours:
        mine, peer = pooled(ours[at]), pooled(theirs[at])
        rows.append(row("output_tokens_per_s", "tokens/s", at, mine.tokens_per_s, PEER, peer.tokens_per_s))
        rows.append(row("ttft_p50_ms", "ms", at, mine.ttft_ms(0.5), PEER, peer.ttft_ms(0.5)))
        rows.append(row("itl_p50_ms", "ms", at, mine.itl_ms(0.5), PEER, peer.itl_ms(0.5)))
    return rows


def _judge(ours: Passes, theirs: Passes) -> None:
    """Says on standard error whether the aim was met, and how far the passes lay apart."""
    out = console(stderr=True)
    for at in ours:
        ratio = pooled(ours[at]).tokens_per_s / pooled(theirs[at]).tokens_per_s
        verdict = "met" if ratio >= AIM_RATIO else "missed"
        each = [" and ".join(f"{result.tokens_per_s:.1f}" for result in side[at]) for side in (ours, theirs)]
        out.print(
            f"aim: {AIM_RATIO} of {PEER}'s tokens/s at {at}: {verdict} ({ratio:.3f}; ours {each[0]}, theirs {each[1]})"
        )
