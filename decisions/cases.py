"""A request on its way through admission: what is known of it, what the world is at that moment, and how checks are run on it.

A `Case` gathers what is known of one request. A check takes it and the `World`, and returns it with what it found, or a `Refusal`. The checks
themselves, and their order, are in `decisions.admission`; what comes of a case is in `decisions.verdicts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from decisions import cache, placement
from decisions.cache import Entry, Policy
from decisions.ledger import Counters
from decisions.placement import SeenWorker
from decisions.quota import Reserved
from decisions.signature import text_lengths
from schemas.events import (
    Decision,
    InferenceAnswered,
    InferenceRequested,
    Keyed,
    ModelVersionRegistered,
    Position,
    Rates,
    Reply,
    TenantChanged,
    Tensor,
)
from schemas.quick import quick
from schemas.reasons import Reason
from schemas.topics import REQUEST_MAX_BYTES

PASSED, REFUSED = "passed", "refused"


class Grant(Protocol):
    """What a grant says, once its signature is verified."""

    @property
    def tenant(self) -> str:
        """Who asks."""

    @property
    def key_id(self) -> str:
        """The API key it was minted for."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers it opens."""

    @property
    def reply(self) -> Reply:
        """Where answers go."""

    @property
    def expires_ms(self) -> int:
        """From when on it is void."""


class World(Protocol):
    """What admission knows at one moment besides the request itself; reading it has no effect."""

    def tenant(self, name: str) -> TenantChanged | None:
        """The tenant's state."""

    def stable(self, model: str) -> ModelVersionRegistered | None:
        """The version that requests for a model's name go to."""

    def workers(self, model: str, version: str) -> Iterable[SeenWorker]:
        """The workers that serve a version, as they last reported."""

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has; None if it doesn't exist."""

    @property
    def ends(self) -> Mapping[tuple[str, int], int]:
        """By (work topic, partition), the offset after the last record known there."""

    def start_up_ms(self, model: str, version: str) -> int | None:
        """How long a worker of a version took to be ready, the last time one did; None if none was seen."""

    def queued(self, model: str, version: str) -> int:
        """How many requests to a version were let in here, and no worker has begun."""

    def counters(self, partition: int, tenant: str) -> Counters:
        """What a tenant, whose requests are in this partition, has reserved and spent in this tier."""

    def open_requests(self, partition: int, tenant: str, model: str, version: str) -> int:
        """How many requests of a tenant to a version are admitted and haven't ended."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request isn't let in. `ending`: it could be as soon as something that runs has ended."""

    reason: Reason
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    rates: Rates | None = None
    ending: bool = False


@quick
@dataclass(frozen=True)
class Case:
    """One request, the record it came in, and what the checks have found so far.

    `requested_ms` is the record's timestamp: with `waited_ms`, how long it has waited for its turn, it is "now" for every check. `keyed` is by what
    it is known when it is asked again. Fields below `stale_ms` are filled on the way. `limited` says whether any limit holds for it. `ahead` of it
    so many others of its tenant wait for their turn. `placed`: it has waited for its own, in a queue that had room for it.

    `cache_key` names its answer in the response cache, and is empty if none can be there. `entry` is what was found under it, `cached_ms` how
    old that is if it is the answer. `beside` is where equal work went last.
    """

    request: InferenceRequested
    grant: Grant
    tier: str
    requested_ms: int
    source: Position
    content_bytes_max: int = REQUEST_MAX_BYTES
    stale_ms: int = placement.STALE_MS
    keyed: Keyed | None = None
    waited_ms: int = 0
    ahead: int = 0
    placed: bool = False
    cache_salt: str = ""
    version: ModelVersionRegistered | None = None
    prompt_token_ids: tuple[int, ...] = ()
    inputs: tuple[Tensor, ...] | None = None
    prompt_tokens: int = 0
    vocab_size: int = 0
    max_tokens: int = 0
    deadline_ms: int = 0
    reserved: Reserved | None = None
    limited: bool = False
    rates: Rates | None = None
    partition: int = 0
    cache_key: str = ""
    entry: Entry | None = None
    cached_ms: int | None = None
    beside: int | None = None
    decisions: tuple[Decision, ...] = field(default=())

    def noting(self, check: str, outcome: str = PASSED, detail: str = "", **found: Any) -> Case:
        """The case with one decision more, and the fields that it settled."""
        found["decisions"] = (*self.decisions, Decision(check, outcome, detail))
        return _copied(self, found)

    def having(self, **found: Any) -> Case:
        """The case with some fields settled."""
        return _copied(self, found)

    @property
    def now_ms(self) -> int:
        """When it is judged."""
        return self.requested_ms + self.waited_ms

    @property
    def told_first(self) -> bool:
        """Whether its admission must be in the log before its work is: what it reserves, or its key, must survive whatever crashes."""
        return self.limited or self.keyed is not None

    @property
    def routed(self) -> ModelVersionRegistered:
        """The version chosen. Only after the check `route`."""
        if self.version is None:
            raise LookupError("the case isn't routed yet")
        return self.version

    @property
    def hit(self) -> InferenceAnswered | None:
        """The answer from the response cache, if it has one."""
        return self.entry.answer if self.entry is not None and self.cached_ms is not None else None

    @property
    def deterministic(self) -> bool:
        """Whether its answer is the same whenever it is asked."""
        return self.request.inputs is not None or cache.deterministic(self.request.sampling)

    @property
    def reserved_tokens(self) -> int:
        """The most that it may use: the prompt once, and for each choice the longest answer; from the cache what it costs there."""
        if self.hit is not None:
            return cache.hit_cost(self.routed, self.hit).tokens
        return self.prompt_tokens + self.max_tokens * self.request.sampling.n

    @property
    def policy(self) -> Policy:
        """What its caller wants of the response cache. Only after the check `validation`."""
        return cache.parse(self.request.cache_control)


_put_fields: Callable[[Case, dict[str, Any]], None] = Case.__dict__["__dict__"].__set__


def _copied(case: Case, found: dict[str, Any]) -> Case:
    """A case with some fields settled. `replace` would take several times as long."""
    after = object.__new__(Case)
    _put_fields(after, case.__dict__ | found)
    return after


class _Draft(Case):
    """A case while it is judged, which nobody else has: what a check notes is put into it and not into one more copy, a dozen times a request."""

    @classmethod
    def of(cls, case: Case) -> Self:
        """A draft of a case, which stays as it is."""
        draft = object.__new__(cls)
        _put_fields(draft, dict(case.__dict__))
        return draft

    def settled(self) -> Case:
        """The case that it has become; the draft isn't used any more."""
        case = object.__new__(Case)
        _put_fields(case, self.__dict__)
        return case

    def noting(self, check: str, outcome: str = PASSED, detail: str = "", **found: Any) -> Case:
        fields = self.__dict__
        fields |= found
        fields["decisions"] = (*fields["decisions"], Decision(check, outcome, detail))
        return self

    def having(self, **found: Any) -> Case:
        self.__dict__.update(found)
        return self


Check = Callable[[Case, World], Case | Refusal]
Verdict = tuple[Case, Refusal | None]


def judge(case: Case, world: World, checks: Iterable[tuple[str, Check]]) -> Verdict:
    """Run the checks in order up to the first refusal; every one leaves its decision in the case."""
    draft = _Draft.of(case)
    for name, check in checks:
        found = check(draft, world)
        if isinstance(found, Refusal):
            draft.noting(name, REFUSED, found.reason.value)
            return draft.settled(), found
    return draft.settled(), None


def refuse(case: Case, check: str, refusal: Refusal) -> Verdict:
    """A refusal of `check`, noted in the case."""
    return case.noting(check, REFUSED, refusal.reason.value), refusal


def tokenised(case: Case, prompt_token_ids: tuple[int, ...], vocab_size: int) -> Case:
    """The case with its prompt as the model will read it."""
    count = len(prompt_token_ids)
    return case.noting(
        "tokenise",
        PASSED,
        f"{count} tokens",
        prompt_token_ids=prompt_token_ids,
        prompt_tokens=count,
        vocab_size=vocab_size,
    )


def prepared(case: Case, inputs: tuple[Tensor, ...], vocab_size: int) -> Case:
    """The case of a tensor model with its inputs as its worker will get them: texts as token ids."""
    lengths = text_lengths(case.routed.processor, inputs)
    count = sum(lengths)
    detail = f"{count} tokens in {len(lengths)} texts" if lengths else "no text"
    return case.noting("tokenise", PASSED, detail, inputs=inputs, prompt_tokens=count, vocab_size=vocab_size)
