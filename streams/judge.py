"""Puts a request through the checks of `decisions.admission`, with what they need of the world, and the tokenising between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from decisions import admission as rules
from decisions.admission import AFTER_TOKENISING, BEFORE_TOKENISING, Case, Refusal
from decisions.quota import ENDING_WAIT_MS
from infra import metrics
from schemas.errors import HeadraceError
from schemas.events import ModelVersionRegistered
from schemas.reasons import Reason
from schemas.topics import work_topic
from streams.accounts import Ledgers
from streams.tokenizers import Tokenizers
from streams.world import LiveWorld

ENDING_TOLD_S = 0.6
"""An answer's ending is in `lifecycle` that long after its caller has it, at most, unless something is wrong;"""
WAITING_MAX, WAITING_OF_TENANT_MAX = 32, 4
"""so many requests wait for that, in all and of one tenant."""


class Judge:
    """Decides, and changes nothing."""

    def __init__(self, world: LiveWorld, tokenizers: Tokenizers, ledgers: Ledgers) -> None:
        self._world = world
        self._tokenizers = tokenizers
        self._ledgers = ledgers
        self._waiting: Counter[str] = Counter()

    async def decide(self, case: Case) -> rules.Verdict:
        """What all checks say of a case. The last of them have just been made when it returns: nothing came between."""
        await self._world.meet_model(case.request.model[: rules.MESSAGE_CHARS_MAX])
        with _timed("before tokenising"):
            verdict = rules.judge(case, self._world, BEFORE_TOKENISING)
        case, refusal = await self._once_more(case, verdict, BEFORE_TOKENISING)
        if refusal is not None:
            return case, refusal
        version = case.routed
        await self._world.counts.learn(work_topic(version.model, version.version, case.tier))
        try:
            with _timed("tokenise"):
                case = await self.tokenise(case, version)
        except HeadraceError as error:
            return rules.refuse(case, "tokenise", Refusal(error.reason, error.message, error.param))
        with _timed("after tokenising"):
            verdict = rules.judge(case, self._world, AFTER_TOKENISING)
        return await self._once_more(case, verdict, AFTER_TOKENISING)

    async def _once_more(
        self, case: Case, verdict: rules.Verdict, checks: Iterable[tuple[str, rules.Check]]
    ) -> rules.Verdict:
        """Judged again, for a while, if only what runs is in the way: who asks right after an answer is faster than the log tells its ending.

        Few wait so, and fewer of one tenant: a flood is refused at once.
        """
        tenant, loop = case.grant.tenant, asyncio.get_running_loop()
        until_s = loop.time() + ENDING_TOLD_S
        while (
            (refusal := verdict[1]) is not None
            and (refusal.reason, refusal.retry_after_ms) == (Reason.RATE_LIMITED, ENDING_WAIT_MS)
            and loop.time() < until_s
            and self._waiting[tenant] < WAITING_OF_TENANT_MAX
            and self._waiting.total() < WAITING_MAX
        ):
            self._waiting[tenant] += 1
            try:
                await self._ledgers.news(case.source.partition, until_s - loop.time())
            finally:
                self._waiting[tenant] -= 1
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
            verdict = rules.judge(case, self._world, checks)
        return verdict

    async def tokenise(self, case: Case, version: ModelVersionRegistered) -> Case:
        """The case with its prompt in a version's token ids. Raises HeadraceError if it can't be had."""
        tokenizer = await self._tokenizers.get(version)
        ids = await self._tokenizers.tokenise(case.request, tokenizer, case.requested_ms)
        return rules.tokenised(case, ids, tokenizer.vocab_size)


@contextlib.contextmanager
def _timed(step: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        metrics.ADMISSION_SECONDS.labels(step).observe(time.perf_counter() - began)
