"""The pool: short inputs at once, long ones in threads, never more than its bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from schemas.errors import HeadraceError
from schemas.events import Message
from schemas.reasons import Reason
from text.pool import INLINE_CHARS, TokenizePool
from text.tokenizer import ByteTokenizer

LONG = "x" * (INLINE_CHARS + 1)


class GatedTokenizer(ByteTokenizer):
    """Waits, when it encodes, until the gate opens; remembers the threads that it ran in."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.get_ident())
        if len(text) > INLINE_CHARS:
            assert self.gate.wait(30)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
async def pool() -> AsyncIterator[TokenizePool]:
    pool = TokenizePool(1, max_waiting=2)
    yield pool
    pool.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the pool's threads know no event of this loop
            await asyncio.sleep(0)


async def test_a_short_input_is_done_at_once_while_a_long_one_runs(pool: TokenizePool) -> None:
    tokenizer = GatedTokenizer()
    long = asyncio.create_task(pool.encode(tokenizer, LONG, add_special_tokens=False))
    await asyncio.sleep(0)
    assert await pool.encode(tokenizer, "ab", add_special_tokens=False) == [97, 98]
    assert await pool.encode_chat(tokenizer, [Message("user", "ab")]) == [97, 98]
    assert not long.done()
    tokenizer.gate.set()
    assert len(await long) == len(LONG)
    own = threading.get_ident()
    assert sorted(thread == own for thread in tokenizer.threads) == [False, True, True]


async def test_a_long_chat_runs_in_a_thread(pool: TokenizePool) -> None:
    tokenizer = GatedTokenizer()
    tokenizer.gate.set()
    assert len(await pool.encode_chat(tokenizer, [Message("user", LONG)])) == len(LONG)
    assert tokenizer.threads != [threading.get_ident()]


async def test_one_input_beyond_the_bound_is_refused(pool: TokenizePool) -> None:
    tokenizer = GatedTokenizer()
    waiting = [asyncio.create_task(pool.encode(tokenizer, LONG, add_special_tokens=False)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(HeadraceError) as caught:
        await pool.encode(tokenizer, LONG, add_special_tokens=False)
    assert caught.value.reason is Reason.OVERLOADED
    tokenizer.gate.set()
    await asyncio.gather(*waiting)
    await until(lambda: pool.waiting == 0)
    assert len(await pool.encode(tokenizer, LONG, add_special_tokens=False)) == len(LONG)


async def test_an_abandoned_input_counts_until_its_thread_is_free(pool: TokenizePool) -> None:
    tokenizer = GatedTokenizer()
    abandoned = asyncio.create_task(pool.encode(tokenizer, LONG, add_special_tokens=False))
    await until(lambda: bool(tokenizer.threads))
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    assert pool.waiting == 1
    tokenizer.gate.set()
    await until(lambda: pool.waiting == 0)


async def test_a_failure_reaches_the_caller_and_frees_its_place(pool: TokenizePool) -> None:
    with pytest.raises(HeadraceError, match="surrogate"):
        await pool.encode(ByteTokenizer(), LONG + "\ud800", add_special_tokens=False)
    await until(lambda: pool.waiting == 0)


class Panic(BaseException):
    """As `tokenizers` raises when its Rust code panics."""


class PanickingTokenizer(ByteTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise Panic("index out of bounds")


@pytest.mark.parametrize("text", ["ab", LONG])
async def test_a_panic_fails_its_input_alone(pool: TokenizePool, text: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        await pool.encode(PanickingTokenizer(), text, add_special_tokens=False)
    assert caught.value.reason is Reason.INTERNAL_ERROR
    assert await pool.encode(ByteTokenizer(), "ab", add_special_tokens=False) == [97, 98]
