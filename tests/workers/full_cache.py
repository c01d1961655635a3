"""A vLLM whose KV cache doesn't hold all that runs: `python -m tests.workers.full_cache MODEL_DIR` prints, as JSON, in which order requests end and what they make.

Two of a lower tier begin, then one of a higher. Each comes to CONTEXT tokens, and the cache holds half as much as all three, so some have to begin
anew. Then those of the lower tier are asked once more, alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing

from schemas.events import Sampling
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.vllm import VllmEngine

CONTEXT, PROMPT = 96, 20
BLOCK = 32
BLOCKS = 3 * CONTEXT // 2 // BLOCK
"""That are used; vLLM keeps one more for itself."""
PRIORITIES = {"batch": 1, "batch 2": 1, "live": 0}
"""By name, in the order in which they begin."""
LOWER = ("batch", "batch 2")
RUN_S_MAX = 300.0


async def main(folder: str) -> None:
    """Prints two lists of names and token ids, in the order of their ends: of those that ran at once, and of those that ran alone."""
    args: dict[str, object] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS + 1,
    }
    engine = VllmEngine(EngineConfig("full-cache", folder, CONTEXT, 4, args))
    await engine.start()
    at_once: list[tuple[str, list[int]]] = []
    alone: list[tuple[str, list[int]]] = []
    sampling = Sampling(max_tokens=CONTEXT - PROMPT, temperature=0.0, ignore_eos=True)

    async def run(name: str, begun: asyncio.Event, ended: list[tuple[str, list[int]]]) -> None:
        prompt, made = tuple(range(1_000 * len(name), 1_000 * len(name) + PROMPT)), list[int]()
        request = EngineRequest(name, prompt, sampling, priority=PRIORITIES[name])
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                made.extend(chunk.token_ids)
                begun.set()
        ended.append((name, made))

    try:
        async with asyncio.timeout(RUN_S_MAX):
            async with asyncio.TaskGroup() as group:
                for name in PRIORITIES:
                    begun = asyncio.Event()
                    group.create_task(run(name, begun, at_once))
                    await begun.wait()
            for name in LOWER:
                await run(name, asyncio.Event(), alone)
    finally:
        await engine.shutdown()
    sys.stdout.write(json.dumps([at_once, alone]) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
