"""Which requests are let in, and where they go: an ordered list of checks, each a pure function.

A `Case` gathers what is known of one request. Each check takes the case and the `World` and returns the case with what
it found, or a `Refusal`. `BEFORE_TOKENISING` and `AFTER_TOKENISING` are the list; between the two halves the shell turns
the input to token ids (`tokenised`). A check joins by being put in its place in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from decisions import placement, quota, waiting
from decisions.ledger import ALL_KEYS_AND_MODELS, Cost, Counters
from decisions.placement import SeenWorker
from decisions.quota import Exceeded, Gauge, Reserved
from decisions.validation import Problem, problem, vocabulary_problem
from schemas.events import (
    Decision,
    InferenceAdmitted,
    InferenceCancelled,
    InferenceFailed,
    InferenceRejected,
    InferenceRequested,
    InferenceScheduled,
    ModelVersionRegistered,
    Position,
    Quota,
    Rates,
    Reply,
    TenantChanged,
)
from schemas.ids import REQUEST_ID_CHARS, is_request_id
from schemas.reasons import Reason
from schemas.topics import DEFAULTS, INLINE_MAX_BYTES, TOKENS, work_topic

PASSED, REFUSED = "passed", "refused"
ENCODINGS = ("avro", "json")
RETRY_AFTER_MIN_MS = 1_000
MESSAGE_CHARS_MAX = 1_000
"""A refusal may quote the caller; no more than this of it travels."""


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

    def counters(self, partition: int, tenant: str) -> Counters:
        """What a tenant, whose requests are in this partition, has reserved and spent in this tier."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request isn't let in."""

    reason: Reason
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    rates: Rates | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One request, the record it came in, and what the checks have found so far.

    `requested_ms` is the record's timestamp: it is "now" for every check. Fields below `stale_ms` are filled on the way. `limited` says whether
    any limit holds for it: then its reservation must be in the log before its work is.
    """

    request: InferenceRequested
    grant: Grant
    tier: str
    requested_ms: int
    source: Position
    content_bytes_max: int = INLINE_MAX_BYTES
    stale_ms: int = placement.STALE_MS
    cache_salt: str = ""
    version: ModelVersionRegistered | None = None
    prompt_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    max_tokens: int = 0
    deadline_ms: int = 0
    reserved: Reserved | None = None
    limited: bool = False
    rates: Rates | None = None
    partition: int = 0
    decisions: tuple[Decision, ...] = field(default=())

    def noting(self, check: str, outcome: str = PASSED, detail: str = "", **found: Any) -> Case:
        """The case with one decision more, and the fields that it settled."""
        return replace(self, decisions=(*self.decisions, Decision(check, outcome, detail)), **found)

    @property
    def routed(self) -> ModelVersionRegistered:
        """The version chosen. Only after the check `route`."""
        if self.version is None:
            raise LookupError("the case isn't routed yet")
        return self.version


Check = Callable[[Case, World], Case | Refusal]
Verdict = tuple[Case, Refusal | None]


def judge(case: Case, world: World, checks: Iterable[tuple[str, Check]]) -> Verdict:
    """Run the checks in order up to the first refusal; every one leaves its decision in the case."""
    for name, check in checks:
        found = check(case, world)
        if isinstance(found, Refusal):
            return refuse(case, name, found)
        case = found
    return case, None


def refuse(case: Case, check: str, refusal: Refusal) -> Verdict:
    """A refusal of `check`, noted in the case."""
    return case.noting(check, REFUSED, refusal.reason.value), refusal


def tokenised(case: Case, prompt_token_ids: tuple[int, ...], vocab_size: int) -> Case:
    """The case with its prompt as the model will read it."""
    detail = f"{len(prompt_token_ids)} tokens"
    return case.noting("tokenise", PASSED, detail, prompt_token_ids=prompt_token_ids, vocab_size=vocab_size)


# --- the checks ------------------------------------------------------------------------------------------------------


def check_reply(case: Case, world: World) -> Case | Refusal:
    """The grant names a place where its tenant may hear; first, for every other refusal goes there."""
    if (refusal := reply_refusal(case.grant, world)) is not None:
        return refusal
    reply = case.grant.reply
    return case.noting("reply", PASSED, f"{reply.topic}/{reply.partition} {reply.encoding}")


def reply_refusal(grant: Grant, world: World) -> Refusal | None:
    """Why nothing may be written to the grant's reply partition, or None. Such a refusal can't be told to the caller."""
    reply = grant.reply
    if reply.topic not in (TOKENS, f"{TOKENS}.{grant.tenant}"):
        return Refusal(
            Reason.PERMISSION_DENIED,
            f"a grant of this tenant replies to {TOKENS} or {TOKENS}.{grant.tenant}",
            "grant",
        )
    if reply.encoding not in ENCODINGS:
        return Refusal(
            Reason.INVALID_GRANT,
            f"the grant's reply encoding must be one of {', '.join(ENCODINGS)}",
            "grant",
        )
    partitions = world.partitions(reply.topic)
    if partitions is None:
        return Refusal(Reason.NOT_FOUND, f"the reply topic {reply.topic} doesn't exist", "grant")
    if not 0 <= reply.partition < partitions:
        return Refusal(Reason.INVALID_GRANT, f"{reply.topic} has no partition {reply.partition}", "grant")
    return None


def check_grant(case: Case, world: World) -> Case | Refusal:
    """The grant is in force: not expired by the record's own time, its tenant active, its key not revoked, its tier open."""
    if (refusal := grant_refusal(case.grant, case.tier, case.requested_ms, world)) is not None:
        return refusal
    tenant = world.tenant(case.grant.tenant)
    salt = tenant.cache_salt if tenant is not None else ""
    return case.noting("grant", PASSED, f"tenant {case.grant.tenant}, key {case.grant.key_id}", cache_salt=salt)


def grant_refusal(grant: Grant, tier: str, now_ms: int, world: World) -> Refusal | None:
    """Why the grant isn't in force, or None."""
    if (expired := _expired(grant, now_ms)) is not None:
        return expired
    tenant = world.tenant(grant.tenant)
    if tenant is None:
        return Refusal(Reason.INVALID_GRANT, "the grant's tenant doesn't exist", "grant")
    if tenant.disabled:
        return Refusal(Reason.PERMISSION_DENIED, "the tenant is disabled", "grant")
    key = next((key for key in tenant.keys if key.key_id == grant.key_id), None)
    if key is None:
        return Refusal(Reason.INVALID_GRANT, "the tenant has no such key any more", "grant")
    if key.revoked_ms is not None and key.revoked_ms <= now_ms:
        return Refusal(Reason.INVALID_GRANT, "the key is revoked", "grant")
    if tier not in grant.tiers or tier not in key.tiers:
        return _tier_refusal(tier)
    return None


def _expired(grant: Grant, now_ms: int) -> Refusal | None:
    if now_ms < grant.expires_ms:
        return None
    return Refusal(
        Reason.GRANT_EXPIRED,
        f"the grant expired {now_ms - grant.expires_ms} ms before the record was written; get a new one",
        "grant",
    )


def _tier_refusal(tier: str) -> Refusal:
    return Refusal(Reason.PERMISSION_DENIED, f"the key doesn't open the tier {tier}", "grant")


def check_valid(case: Case, _world: World) -> Case | Refusal:
    """Every field is in its range."""
    return _passed_unless(problem(case.request, case.content_bytes_max), case, "validation")


def check_route(case: Case, world: World) -> Case | Refusal:
    """The model's name leads to its stable version."""
    model = case.request.model
    version = world.stable(model)
    if version is None:
        return Refusal(
            Reason.MODEL_NOT_FOUND,
            f"The model `{model}` does not exist; ask for the list of models to see those that do.",
            "model",
        )
    if case.tier not in version.tiers:
        return Refusal(Reason.MODEL_NOT_FOUND, f"The model `{model}` is not served on the tier {case.tier}.", "model")
    return case.noting("route", version.version, "stable", version=version)


def check_vocabulary(case: Case, _world: World) -> Case | Refusal:
    """The model has every token that the request names."""
    ids = case.request.prompt_token_ids
    return _passed_unless(vocabulary_problem(case.request.sampling, ids, case.vocab_size), case, "vocabulary")


def check_context(case: Case, _world: World) -> Case | Refusal:
    """Prompt and answer fit the context; `max_tokens` becomes what is left where the caller gave none."""
    limit, prompt, sampling = case.routed.context_length, len(case.prompt_token_ids), case.request.sampling
    if not prompt:
        return Refusal(Reason.INVALID_REQUEST, "the prompt has no tokens", _input_param(case.request))
    asked = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
    if prompt + asked > limit:
        return Refusal(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + asked} tokens "
            f"({prompt} in the {_input_param(case.request)}, {asked} in the completion). "
            "Please reduce the length of either one.",
            _input_param(case.request),
        )
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else limit - prompt
    return case.noting("context", PASSED, f"{prompt} + {max_tokens} of {limit} tokens", max_tokens=max_tokens)


def check_deadline(case: Case, _world: World) -> Case | Refusal:
    """The deadline, from the record's own time and the caller's or the model's timeout."""
    given = case.request.timeout_ms
    timeout_ms = given if given is not None else case.routed.default_timeout_ms
    detail = f"{timeout_ms} ms, {'asked for' if given is not None else 'the default'}"
    return case.noting("deadline", PASSED, detail, deadline_ms=case.requested_ms + timeout_ms)


def check_wait(case: Case, world: World) -> Case | Refusal:
    """Its turn comes before its deadline, as far as can be told, and not too many wait already."""
    version, now_ms = case.routed, case.requested_ms
    topic = work_topic(version.model, version.version, case.tier)
    seen = waiting.outlook(
        topic,
        world.workers(version.model, version.version),
        world.ends,
        now_ms,
        world.start_up_ms(version.model, version.version),
        case.stale_ms,
    )
    depth = version.max_queue_depth.get(case.tier)
    if depth is not None and seen.wait_ms != 0 and seen.waiting >= depth:
        return Refusal(
            Reason.OVERLOADED,
            f"{seen.waiting} requests wait for the model `{version.model}` already, and no more than {depth} may. Try again later.",
            "model",
            RETRY_AFTER_MIN_MS,
        )
    left_ms = case.deadline_ms - now_ms
    if seen.wait_ms is not None and seen.wait_ms > left_ms:
        return Refusal(
            Reason.OVERLOADED if seen.ready else Reason.NO_WORKER,
            f"The model `{version.model}` can't begin before the deadline: it would take about {seen.wait_ms} ms, and {left_ms} ms "
            "are left. Give it more time, or try again later.",
            "timeout",
            max(RETRY_AFTER_MIN_MS, seen.wait_ms - left_ms),
        )
    return case.noting("wait", PASSED, seen.detail)


def check_room(case: Case, world: World) -> Case | Refusal:
    """The tenant has room for the smallest request there is: who is far over its limits costs no tokenising."""
    found = _reserve(case, world, 1)
    return found if isinstance(found, Refusal) else case


def check_quota(case: Case, world: World) -> Case | Refusal:
    """The tenant has room for prompt and answer in all its limits. What it reserves counts only if every other check passes, too."""
    found = _reserve(case, world, reserved_tokens(case))
    if isinstance(found, Refusal):
        return found
    reserved, gauges = found
    rates = quota.rates(gauges, case.requested_ms) if gauges else None
    detail = f"{reserved_tokens(case)} tokens reserved, {len(gauges) or 'no'} limits"
    return case.noting("quota", PASSED, detail, reserved=reserved, limited=bool(gauges), rates=rates)


def _reserve(case: Case, world: World, tokens: int) -> tuple[Reserved, list[Gauge]] | Refusal:
    """What a request of so many tokens would hold, and all limits as they would be then."""
    tenant, now_ms = case.grant.tenant, case.requested_ms
    limits = quota.limits_for(quotas_of(tenant, case.tier, world), case.grant.key_id, case.routed.model)
    counters = world.counters(case.source.partition, tenant)
    found = quota.reserve(counters, limits, Cost(tokens), now_ms)
    if isinstance(found, Exceeded):
        told = quota.rates(quota.gauges(counters, limits, now_ms), now_ms)
        return Refusal(Reason.RATE_LIMITED, found.message, None, found.retry_after_ms, told)
    return found, quota.gauges({**counters, **found.changed}, limits, now_ms)


def quotas_of(tenant: str, tier: str, world: World) -> tuple[Quota, ...]:
    """The tenant's own quotas of the tier, or the default ones if it has none there."""
    own, default = world.tenant(tenant), world.tenant(DEFAULTS)
    return quota.in_force(own.quotas if own is not None else (), default.quotas if default is not None else (), tier)


def reserved_tokens(case: Case) -> int:
    """The most that a request may use: the prompt once, and for each choice the longest answer."""
    return len(case.prompt_token_ids) + case.max_tokens * case.request.sampling.n


def check_place(case: Case, world: World) -> Case | Refusal:
    """The work partition, by load."""
    version = case.routed
    topic = work_topic(version.model, version.version, case.tier)
    partitions = world.partitions(topic)
    if partitions is None:
        return Refusal(
            Reason.UNAVAILABLE,
            f"The model `{version.model}` is registered, but its topic {topic} doesn't exist yet.",
            "model",
        )
    workers = world.workers(version.model, version.version)
    request_id = case.request.request_id
    chosen = placement.place(request_id, topic, partitions, workers, world.ends, case.requested_ms, case.stale_ms)
    return case.noting("place", f"{topic}/{chosen.partition}", chosen.detail, partition=chosen.partition)


BEFORE_TOKENISING: tuple[tuple[str, Check], ...] = (
    ("reply", check_reply),
    ("grant", check_grant),
    ("validation", check_valid),
    ("route", check_route),
    ("quota", check_room),
)
AFTER_TOKENISING: tuple[tuple[str, Check], ...] = (
    ("vocabulary", check_vocabulary),
    ("context", check_context),
    ("deadline", check_deadline),
    ("wait", check_wait),
    ("quota", check_quota),
    ("place", check_place),
)


def _passed_unless(found: Problem | None, case: Case, check: str) -> Case | Refusal:
    if found is None:
        return case.noting(check)
    reason = Reason.PAYLOAD_TOO_LARGE if found.too_large else Reason.INVALID_REQUEST
    return Refusal(reason, found.message, found.param)


def _input_param(request: InferenceRequested) -> str:
    if request.messages is not None:
        return "messages"
    return "prompt" if request.prompt is not None else "prompt_token_ids"


# --- what a verdict becomes ------------------------------------------------------------------------------------------


def admitted(case: Case) -> tuple[InferenceScheduled, InferenceAdmitted]:
    """The work, and the record of letting it in."""
    request, grant, version = case.request, case.grant, case.routed
    scheduled = InferenceScheduled(
        request_id=request.request_id,
        tenant=grant.tenant,
        model=version.model,
        version=version.version,
        tier=case.tier,
        prompt_token_ids=case.prompt_token_ids,
        sampling=replace(request.sampling, max_tokens=case.max_tokens),
        deadline_ms=case.deadline_ms,
        requested_ms=case.requested_ms,
        reply=grant.reply,
        cache_salt=case.cache_salt,
        stream=request.stream,
        source=case.source,
        time_limit_ms=version.time_limit_ms,
        rates=case.rates,
    )
    return scheduled, InferenceAdmitted(
        request_id=request.request_id,
        tenant=grant.tenant,
        key_id=grant.key_id,
        model=version.model,
        version=version.version,
        tier=case.tier,
        reply=grant.reply,
        work_topic=work_topic(version.model, version.version, case.tier),
        work_partition=case.partition,
        prompt_tokens=len(case.prompt_token_ids),
        max_tokens=case.max_tokens,
        reserved_tokens=reserved_tokens(case),
        requested_ms=case.requested_ms,
        deadline_ms=case.deadline_ms,
        source=case.source,
        decisions=case.decisions,
        time_limit_ms=version.time_limit_ms,
        scopes=case.reserved.hold.scopes if case.reserved is not None else (ALL_KEYS_AND_MODELS,),
    )


def as_decided(case: Case, verdict: InferenceAdmitted, version: ModelVersionRegistered, world: World) -> Case:
    """A tokenised case with what was decided of it before."""
    tenant = world.tenant(case.grant.tenant)
    return replace(
        case,
        cache_salt=tenant.cache_salt if tenant is not None else "",
        version=version,
        max_tokens=verdict.max_tokens,
        deadline_ms=verdict.deadline_ms,
        partition=verdict.work_partition,
    )


def rejected(case: Case, refusal: Refusal) -> InferenceRejected:
    """The record of a refusal, for `lifecycle` and for the caller."""
    return InferenceRejected(
        # Readers remember the ids of what has ended: whatever a writer put there must not take their memory.
        request_id=case.request.request_id if len(case.request.request_id) <= REQUEST_ID_CHARS else "",
        tenant=case.grant.tenant,
        model=case.request.model[:MESSAGE_CHARS_MAX],
        tier=case.tier,
        reason=refusal.reason.value,
        message=refusal.message[:MESSAGE_CHARS_MAX],
        param=refusal.param,
        retry_after_ms=refusal.retry_after_ms,
        requested_ms=case.requested_ms,
        source=case.source,
        decisions=case.decisions,
        rates=refusal.rates,
    )


def cancel_refusal(event: InferenceCancelled, grant: Grant, tier: str, now_ms: int) -> Refusal | None:
    """Why a cancel isn't taken, or None. All workers remember what was cancelled, so it must name what can be a request.

    A key that was revoked may still take back what it asked: its front door does so.
    """
    if not is_request_id(event.request_id):
        return Refusal(Reason.INVALID_REQUEST, "request_id must be a UUID of version 7 in lower case", "request_id")
    return _expired(grant, now_ms) or (_tier_refusal(tier) if tier not in grant.tiers else None)


def cancelled(event: InferenceCancelled, grant: Grant, tier: str) -> tuple[InferenceFailed, InferenceCancelled]:
    """The ending for the reply partition, and the word for all workers. Both carry the tenant, for readers to compare with the request's."""
    ending = InferenceFailed(
        request_id=event.request_id,
        tenant=grant.tenant,
        model="",
        version="",
        tier=tier,
        reason=Reason.CANCELLED.value,
        message=Reason.CANCELLED.text,
        source="cancel",
    )
    return ending, InferenceCancelled(event.request_id, grant.tenant)
