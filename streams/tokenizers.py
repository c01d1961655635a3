"""Loads tokenizers beside the event loop, once each, and turns requests' inputs to token ids."""

from __future__ import annotations

import asyncio

from schemas.events import InferenceRequested, ModelVersionRegistered
from text.pool import TokenizePool
from text.tokenizer import Tokenizer, load_tokenizer


class Tokenizers:
    """One tokenizer a model version. A load that failed is tried again at the next request."""

    def __init__(self, threads: int) -> None:
        self._pool = TokenizePool(threads)
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}

    def close(self) -> None:
        """Drop what waits."""
        self._pool.close()

    async def get(self, version: ModelVersionRegistered) -> Tokenizer:
        """The version's tokenizer. Raises HeadraceError (internal_error) when its files hold none."""
        ref = version.tokenizer or version.artifact
        task = self._loading.get(ref)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loading[ref] = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, ref))
        return task.result() if task.done() else await asyncio.shield(task)

    async def tokenise(self, request: InferenceRequested, tokenizer: Tokenizer, now_ms: int) -> tuple[int, ...]:
        """The prompt's token ids. Raises HeadraceError naming what the tokenizer or the chat template refuses."""
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if request.prompt is not None:
            return tuple(await self._pool.encode(tokenizer, request.prompt, add_special_tokens=True))
        return tuple(await self._pool.encode_chat(tokenizer, request.messages or (), now_ms=now_ms))
