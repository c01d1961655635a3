"""A vLLM whose KV cache doesn't hold all that runs: `python -m tests.workers.full_cache MODEL_DIR` prints in which order requests end, as JSON.

Two of a lower tier begin, then one of a higher. Each comes to CONTEXT tokens, and the cache holds half as much as all three.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing

from schemas.events import Sampling
from workers.engines.port import EngineConfig, EngineRequest
from workers.engines.vllm import VllmEngine

CONTEXT, PROMPT = 128, 20
BLOCK = 32
BLOCKS = 3 * CONTEXT // 2 // BLOCK
"""That are used; vLLM keeps one more for itself."""
RUN_S_MAX = 300.0


async def main(folder: str) -> None:
    """Prints the names in the order in which they end."""
    args: dict[str, object] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS + 1,
    }
    engine = VllmEngine(EngineConfig("full-cache", folder, CONTEXT, 4, args))
    await engine.start()
    ended: list[str] = []
    sampling = Sampling(max_tokens=CONTEXT - PROMPT, temperature=0.0, ignore_eos=True)

    async def run(name: str, priority: int, begun: asyncio.Event) -> None:
        prompt = tuple(range(1_000 * len(name), 1_000 * len(name) + PROMPT))
        async with aclosing(engine.generate(EngineRequest(name, prompt, sampling, priority=priority))) as chunks:
            async for _ in chunks:
                begun.set()
        ended.append(name)

    try:
        async with asyncio.timeout(RUN_S_MAX), asyncio.TaskGroup() as group:
            for name, priority in (("batch", 1), ("batch 2", 1), ("live", 0)):
                begun = asyncio.Event()
                group.create_task(run(name, priority, begun))
                await begun.wait()
    finally:
        await engine.shutdown()
    sys.stdout.write(json.dumps(ended) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
