"""A request that is given by reference to the object store: whether it is fetched now or parked unread, and what it is decided by once it is here."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from decisions import admission as rules
from decisions import verdicts
from decisions.cases import Case, Refusal
from decisions.idempotency import keyed
from decisions.recalled import Standing
from infra.log import EventDecoder, Headers
from schemas.events import InferenceAdmitted, PayloadStored
from schemas.topics import INTERACTIVE, REQUEST_MAX_BYTES
from streams.accounts import Ledgers
from streams.alone import Alone, TooManyWait, id_name
from streams.idempotency import Repeats
from streams.intake import shortened
from streams.large import READ_WAIT_S, Claim, Large, Unread
from streams.patience import RETRIED_S, Patience, over
from streams.refusals import Refusals
from streams.turnstile import Turnstile
from streams.world import LiveWorld

Decide = Callable[[Case, int, Headers], Awaitable[None]]

log = structlog.get_logger("streams.admission")


class ByReference:
    """One tier's. What it has fetched it hands to `decide`, with the bytes that it has there, while nobody else decides of its id."""

    def __init__(
        self,
        decoder: EventDecoder,
        world: LiveWorld,
        ledgers: Ledgers,
        turnstile: Turnstile,
        repeats: Repeats,
        refusals: Refusals,
        patience: Patience,
        deciding: Alone,
        decide: Decide,
    ) -> None:
        self._large = Large(decoder, patience.aside)
        self._world = world
        self._ledgers = ledgers
        self._turnstile = turnstile
        self._repeats = repeats
        self._refusals = refusals
        self._patience = patience
        self._deciding = deciding
        self._decide = decide

    async def handle(self, asked: Case, reference: PayloadStored, trace: Headers) -> None:
        """A request, of which `asked` has what the log says. Nothing of it is read for a caller who may not ask."""
        refusal = rules.grant_refusal(asked.grant, asked.tier, asked.requested_ms, self._world)
        claim: Claim | None = None
        try:
            if refusal is None and not await self._may_wait_unread(asked, reference):
                return None
            claim = await self._until_roomy(asked)
            async with self._deciding.of(id_name(asked.grant.tenant, reference.request_id)):
                return await self._fetched(asked, reference, refusal, trace, claim)
        except Unread as unread:
            return await self._refusals.reject(verdicts.rejected(asked, unread.refusal), asked.grant, trace)
        except TooManyWait:  # a refusal would end the stream of the one that is being decided
            log.warning("too many ask with one id", request_id=reference.request_id, tenant=asked.grant.tenant)
            return None
        finally:
            self._turnstile.give_back(asked.source)
            if claim is not None:
                claim.end()

    async def _may_wait_unread(self, asked: Case, reference: PayloadStored) -> bool:
        """Nobody watches a batch request: a new one isn't fetched before its turn is near. Raises Parked, or Unread; False if its partition is gone."""
        source, tenant, name = asked.source, asked.grant.tenant, reference.request_id
        accounts = await self._ledgers.of(source.partition)
        if accounts is None:
            return False
        if accounts.standing(tenant, name, source.offset)[0] is not Standing.NEW:
            return True
        if (found := await self._repeats.standing(asked, accounts)) is None:
            return False
        size = max(0, min(reference.size_bytes, REQUEST_MAX_BYTES))
        decided_now = self._deciding.held(id_name(tenant, name))
        first = found[1] is None and not decided_now and self._turnstile.holds(tenant, name) is None
        self._turnstile.park_unread(asked, size, roomy=self._roomy(asked), first=first)
        if first:
            self._turnstile.reserve(asked)
        return True

    def _roomy(self, asked: Case) -> bool:
        """Whether what is held, or being fetched, of a batch partition leaves room for one more to be fetched."""
        return asked.tier == INTERACTIVE or not (self._turnstile.full(asked.source.partition) or self._large.busy)

    async def _until_roomy(self, asked: Case) -> Claim:
        """One that was parked already, or isn't new, waits here."""
        while not self._roomy(asked):
            await self._patience.a_while(asked.source.partition)
        return Claim(self._large)

    async def _fetched(
        self, asked: Case, reference: PayloadStored, refused: Refusal | None, trace: Headers, claim: Claim
    ) -> None:
        """Raises `Unread` for what can't be had, or may not be asked. What was let in before is told nothing of that: its stream goes on."""
        partition, grant = asked.source.partition, asked.grant
        accounts = await self._ledgers.of(partition)
        if accounts is None:
            return None
        standing, verdict = accounts.standing(grant.tenant, reference.request_id, asked.source.offset)
        known = accounts.reply_of(grant.tenant, reference.request_id)
        if standing is Standing.ENDED:
            return None
        if refused is not None and known is not None and standing is Standing.REPEATED:
            return await self._refusals.asked_again(asked, known, trace)
        if refused is not None and (known is None or standing is Standing.NEW):
            raise Unread(refused)
        until_s, wait_s = time.monotonic() + RETRIED_S, READ_WAIT_S if asked.tier == INTERACTIVE else RETRIED_S
        while True:
            try:
                request = await self._large.read(reference, grant.tenant, wait_s)
            except Unread as unread:
                if known is not None and standing is Standing.REPEATED:
                    return await self._refusals.asked_again(asked, known, trace)
                if standing is not Standing.REDELIVERED or not isinstance(verdict, InferenceAdmitted):
                    raise
                text = unread.refusal.message
                log.warning("its work can't be sent again", request_id=verdict.request_id, reason=text)
                if not unread.refusal.reason.retriable or over(verdict, until_s):
                    return None
                await self._patience.a_while(partition)
            else:
                claim.end()
                request = shortened(request, asked.request.timeout_ms)
                case = replace(asked, request=request, keyed=keyed(request, grant.reply))
                return await self._decide(case, reference.size_bytes, trace)
