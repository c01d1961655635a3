"""Puts a request through the checks of `decisions.admission`, with what they need of the world, and the tokenising between them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from decisions import cases, verdicts
from decisions.accounts import Accounts
from decisions.admission import BEFORE_TOKENISING, PLACING, RESOLVING
from decisions.cases import Case, Refusal
from decisions.signature import TEXT, TEXT_PROCESSORS, text_tensors
from infra import metrics
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered, Tensor
from schemas.tensors import strings
from schemas.topics import INTERACTIVE, work_topic
from streams.accounts import Ledgers
from streams.cache import ResponseCache
from streams.faust_shell import LeftUndone
from streams.presence import LOOK_S, Slots
from streams.tokenizers import Aside, Tokenizers
from streams.turnstile import Turnstile
from streams.world import LiveWorld

LAG_MS = 2_000
"""A request that was written longer ago than this is judged as of now."""
ENDING_TOLD_S = 0.6
"""An answer's ending is in `lifecycle` that long after its caller has it, at most, unless something is wrong;"""
WAITING_MAX, WAITING_OF_TENANT_MAX = 32, 4
"""so many requests wait for that, in all and of one tenant."""


class Judge:
    """Decides, and changes nothing but that who is gone makes way."""

    def __init__(
        self,
        world: LiveWorld,
        tokenizers: Tokenizers,
        ledgers: Ledgers,
        turnstile: Turnstile,
        cache: ResponseCache,
        slots: Slots,
    ) -> None:
        self._turnstile = turnstile
        self._world = world
        self._cache = cache
        self._tokenizers = tokenizers
        self._ledgers = ledgers
        self._slots = slots
        self._waiting: Counter[str] = Counter()

    def decided(self, case: Case, accounts: Accounts, size: int) -> Decided:
        """What all checks say of a case. The last of them have just been made when it is entered: nothing came between.

        While in it, or until it is `left`, the request counts among those of its tenant that wait for a worker. `size` is the bytes of its
        record. Entering raises what `Turnstile.enter` does.
        """
        return Decided(self._entered(case, accounts, size), self._after, self._turnstile.leave)

    async def _entered(self, asked: Case, accounts: Accounts, size: int) -> cases.Verdict:
        """A case through the turnstile. While it waited there its tenant, its key or the stable version may have changed: then it is judged anew."""
        if (lag_ms := int(time.time() * 1000) - asked.requested_ms) > LAG_MS:  # it has lain in the log
            asked = replace(asked, waited_ms=lag_ms)
        before = await self._before(asked)
        while True:
            case, refusal = before
            if refusal is not None:
                return case, refusal
            if not self._ledgers.current(case.source.partition, accounts):
                raise LeftUndone
            entered, refusal = await self._turnstile.enter(case, accounts, size)
            if refusal is not None or entered is case:
                return entered, refusal
            try:
                before = await self._before(replace(asked, waited_ms=entered.waited_ms))
            except BaseException:
                self._turnstile.leave(entered)
                raise
            again, refusal = before
            if refusal is None and again.routed.version == case.routed.version:
                return replace(entered, version=again.routed), None
            self._turnstile.leave(entered)

    async def _before(self, case: Case) -> cases.Verdict:
        await self._world.meet_model(case.request.model[: verdicts.MESSAGE_CHARS_MAX])
        began_s = time.perf_counter()
        verdict = cases.judge(case, self._world, BEFORE_TOKENISING)
        _took(began_s, "before tokenising")
        return await self._once_more(case, verdict, BEFORE_TOKENISING)

    async def _after(self, case: Case) -> cases.Verdict:
        version = case.routed
        await self._world.counts.learn(work_topic(version.model, version.version, case.tier))
        began_s = time.perf_counter()
        try:
            case = await self.tokenise(case, version)
        except HeadraceError as error:
            return cases.refuse(case, "tokenise", Refusal(error.reason, error.message, error.param))
        finally:
            _took(began_s, "tokenise")
        case, refusal = cases.judge(case, self._world, RESOLVING)
        if refusal is not None:
            return case, refusal
        began_s = time.perf_counter()
        case = await self._cache.look_up(verdicts.named_for_cache(case))
        began_s = _took(began_s, "look up")
        case = self._turnstile.placed(case)
        verdict = cases.judge(case, self._world, PLACING)
        _took(began_s, "after tokenising")
        verdict = await self._once_more(case, verdict, PLACING)
        self._cache.count(verdict[0])
        return verdict

    async def _once_more(
        self, case: Case, verdict: cases.Verdict, checks: Iterable[tuple[str, cases.Check]]
    ) -> cases.Verdict:
        """Judged again, for a while, if only what runs is in the way: who asks right after an answer is faster than the log tells its ending, and
        what runs may be nobody's any more (`streams.presence`).

        Few wait so, and fewer of one tenant: a flood is refused at once.
        """
        if not (_only_what_runs(verdict[1]) and self._may_wait(verdict[0].grant.tenant)):
            return verdict
        tenant, loop = case.grant.tenant, asyncio.get_running_loop()
        told_s = loop.time() + ENDING_TOLD_S
        with self._slots.asking() as asking:
            self._waiting[tenant] += 1
            try:
                while _only_what_runs(verdict[1]):
                    until_s = max(told_s, await self._slots.look(verdict[0], asking))
                    if (left_s := until_s - loop.time()) <= 0:
                        break
                    await self._ledgers.news(case.source.partition, min(left_s, LOOK_S))
                    verdict = cases.judge(asking.noted(case), self._world, checks)
            finally:
                self._waiting[tenant] -= 1
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
        return verdict

    def _may_wait(self, tenant: str) -> bool:
        return self._waiting[tenant] < WAITING_OF_TENANT_MAX and self._waiting.total() < WAITING_MAX

    async def tokenise(self, case: Case, version: ModelVersionRegistered) -> Case:
        """The case with its prompt in a version's token ids. Raises HeadraceError if it can't be had."""
        reading = self._turnstile.reading
        aside = (
            reading.aside if reading is not None and case.tier != INTERACTIVE else None
        )  # nobody watches: it may wait
        if case.request.inputs is not None:
            return await self._prepare(case, version, case.request.inputs, aside)
        tokenizer = await self._tokenizers.get(version)
        ids = await self._tokenizers.tokenise(case.request, tokenizer, case.requested_ms, aside)
        return cases.tokenised(case, ids, tokenizer.vocab_size)

    async def _prepare(
        self, case: Case, version: ModelVersionRegistered, inputs: tuple[Tensor, ...], aside: Aside | None
    ) -> Case:
        """The inputs of a tensor model as its worker gets them: texts as token ids."""
        if version.processor not in TEXT_PROCESSORS:
            return cases.prepared(case, inputs, 0)
        tokenizer = await self._tokenizers.get(version)
        text = next((tensor for tensor in inputs if tensor.name == TEXT), None)
        if text is not None:
            inputs = text_tensors(await self._tokenizers.encode(strings(text), tokenizer, aside))
        return cases.prepared(case, inputs, tokenizer.vocab_size)


class Decided(AbstractAsyncContextManager[cases.Verdict]):
    """Every request enters one: a generator would cost more."""

    __slots__ = ("_after", "_entering", "_inside", "_leave")

    def __init__(
        self,
        entering: Awaitable[cases.Verdict],
        after: Callable[[Case], Awaitable[cases.Verdict]],
        leave: Callable[[Case], None],
    ) -> None:
        self._entering, self._after, self._leave = entering, after, leave
        self._inside: Case | None = None

    async def __aenter__(self) -> cases.Verdict:
        case, refusal = await self._entering
        if refusal is not None:
            return case, refusal
        try:
            found = await self._after(case)
        except BaseException:
            self._leave(case)
            raise
        self._inside = case
        return found

    async def __aexit__(self, *_: object) -> None:
        self.left()

    def left(self) -> None:
        """The request counts elsewhere, or nowhere any more; only the first time says anything."""
        if self._inside is not None:
            self._leave(self._inside)
            self._inside = None


def _only_what_runs(refusal: Refusal | None) -> bool:
    """Whether there is room once something ends."""
    return refusal is not None and refusal.ending


def _took(began_s: float, step: str) -> float:
    """A step of one request has ended: notes how long it took, and returns when that was."""
    now_s = time.perf_counter()
    metrics.of(metrics.ADMISSION_SECONDS, step).observe(now_s - began_s)
    return now_s
