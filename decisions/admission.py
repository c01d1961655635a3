"""Which requests are let in, and where they go: an ordered list of checks, each a pure function of a case and the world (`decisions.cases`).

`BEFORE_TOKENISING` and `AFTER_TOKENISING` are the list; between the two halves the shell turns the input to token ids (`cases.tokenised`), and in
the midst of the second half (after `RESOLVING`) it looks for the answer in the response cache (`verdicts.named_for_cache`). A check joins by being
put in its place in the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from decisions import cache, capacity, placement, places, quota, waiting
from decisions.cases import PASSED, Case, Check, Grant, Refusal, World
from decisions.ledger import Cost, Counters
from decisions.places import RETRY_AFTER_MIN_MS
from decisions.problem import Problem
from decisions.quota import ENDING_WAIT_MS, HELD_WAIT_MS, Exceeded
from decisions.signature import text_lengths, unfit, unknown_token
from decisions.validation import problem, vocabulary_problem
from schemas.events import InferenceCancelled, InferenceRequested, Quota, Tensor
from schemas.ids import is_request_id
from schemas.reasons import Reason
from schemas.remembered import Remembered
from schemas.topics import DAY_MS, DEFAULTS, INTERACTIVE, TOKENS, work_topic

ENCODINGS = ("avro", "json")
QUOTAS_KEPT = 4_096
"""Of so many tenants and keys it is remembered which quotas hold: they are asked for several times a request, and seldom change."""


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
    """The grant is in force: not expired by the record's own time, its tenant active, its tier open; its key not revoked, now, whenever the
    record was written.
    """
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
        reason = Reason.INVALID_API_KEY if _by_key(grant) else Reason.PERMISSION_DENIED
        return Refusal(reason, "the tenant is disabled", "grant")
    key = next((key for key in tenant.keys if key.key_id == grant.key_id), None)
    if key is None:
        return Refusal(Reason.INVALID_GRANT, "the tenant has no such key any more", "grant")
    if key.revoked_ms is not None:
        reason = Reason.INVALID_API_KEY if _by_key(grant) else Reason.INVALID_GRANT
        return Refusal(reason, "the key is revoked", "grant")
    if tier not in grant.tiers or tier not in key.tiers:
        return _tier_refusal(tier)
    return None


def _by_key(grant: Grant) -> bool:
    """Whether who asks is a front door's caller, who knows of a key and of no grant."""
    return grant.reply.topic == TOKENS


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
        return unknown_model(model)
    if case.tier not in version.tiers:
        return not_on_tier(model, case.tier)
    given = case.request.prompt_token_ids
    if given is not None and len(given) >= version.context_length:
        return Refusal(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {version.context_length} tokens, and the prompt alone has {len(given)}.",
            "prompt_token_ids",
        )
    return case.noting("route", version.version, "stable", version=version)


def unknown_model(model: str) -> Refusal:
    """No version has a model's name."""
    text = f"The model `{model}` does not exist; ask for the list of models to see those that do."
    return Refusal(Reason.MODEL_NOT_FOUND, text, "model")


def not_on_tier(model: str, tier: str) -> Refusal:
    """Its version has other tiers alone."""
    return Refusal(Reason.MODEL_NOT_FOUND, f"The model `{model}` is not served on the tier {tier}.", "model")


def check_signature(case: Case, _world: World) -> Case | Refusal:
    """The version takes what is given: a prompt, or tensors of these names, datatypes and shapes."""
    if (found := unfit(case.request, case.routed)) is None and case.request.inputs is None:
        return case
    return _passed_unless(found, case, "signature")


def check_vocabulary(case: Case, _world: World) -> Case | Refusal:
    """The model has every token that the request names."""
    if case.inputs is not None:
        if (unknown := unknown_token(case.routed.processor, case.inputs, case.vocab_size)) is None:
            return case.noting("vocabulary")
        text = f"the model has no token {unknown}; its ids run from 0 to {case.vocab_size - 1}"
        return Refusal(Reason.INVALID_REQUEST, text, _input_param(case.request))
    ids = case.request.prompt_token_ids
    return _passed_unless(vocabulary_problem(case.request.sampling, ids, case.vocab_size), case, "vocabulary")


def check_context(case: Case, _world: World) -> Case | Refusal:
    """Prompt and answer fit the context; `max_tokens` becomes what is left where the caller gave none. A tensor model generates no tokens."""
    if case.inputs is not None:
        return _check_texts(case, case.inputs)
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


def _check_texts(case: Case, inputs: tuple[Tensor, ...]) -> Case | Refusal:
    limit, lengths = case.routed.context_length, text_lengths(case.routed.processor, inputs)
    for index, length in enumerate(lengths):
        if not length:
            return Refusal(Reason.INVALID_REQUEST, f"the text at {index} has no tokens", _input_param(case.request))
        if length > limit:
            return Refusal(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"This model's maximum context length is {limit} tokens, and the text at {index} has {length}. Please shorten it.",
                _input_param(case.request),
            )
    return case.noting("context", PASSED, f"at most {max(lengths, default=0)} of {limit} tokens a text")


def check_deadline(case: Case, _world: World) -> Case | Refusal:
    """The deadline, from the record's own time and the caller's or the model's timeout. Nobody waits for a batch line before a screen: it has a
    day where nothing is said.
    """
    given, default_ms = case.request.timeout_ms, case.routed.default_timeout_ms
    if case.tier != INTERACTIVE:
        default_ms = max(default_ms, DAY_MS)
    timeout_ms = given if given is not None else default_ms
    detail = f"{timeout_ms} ms, {'asked for' if given is not None else 'the default'}"
    return case.noting("deadline", PASSED, detail, deadline_ms=case.requested_ms + timeout_ms)


def check_cache(case: Case, _world: World) -> Case | Refusal:
    """Whether what was found in the response cache is the answer; a model without one has nothing to note."""
    version, sampling = case.routed, case.request.sampling
    if not version.cache_ttl_ms:
        return case
    if not case.deterministic:
        return case.noting("cache", cache.PASSED_OVER, f"temperature {sampling.temperature:g}: answers differ")
    age_ms, why = cache.verdict(case.entry, case.policy, version.cache_ttl_ms, case.now_ms)
    return case.noting("cache", cache.MISS if age_ms is None else cache.HIT, why, cached_ms=age_ms)


def check_wait(case: Case, world: World) -> Case | Refusal:
    """Its turn comes before its deadline, as far as can be told, and not too many wait already."""
    if case.hit is not None:
        return case  # it needs no worker
    version, now_ms = case.routed, case.now_ms
    seen = places.outlook(case, world)
    if case.now_ms >= case.deadline_ms:
        return Refusal(Reason.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED.text)
    if (left := _reserved_left(case, world)) > 0:
        return case.noting("wait", PASSED, f"{left} of the slots reserved for the tenant are free")
    if (refusal := places.full(case, world, seen)) is not None:
        return refusal
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


def _reserved_left(case: Case, world: World) -> int:
    """Slots of the pool that are promised to the tenant, kept free for it, and not in use by it: there it waits for nobody."""
    version, tenant = case.routed, case.grant.tenant
    percent = capacity.reserved_percent(quotas_of(tenant, case.tier, world), case.tier, version.model)
    if not percent:
        return 0
    seen = [each for each in places.pool(case, world) if case.now_ms - each.seen_ms <= case.stale_ms]
    ready = [each.report.slots for each in seen if each.report.state == placement.READY]
    promised = sum(sum(capacity.slots_of({tenant: percent}, slots).values()) for slots in ready)
    return promised - world.open_requests(case.source.partition, tenant, version.model, version.version)


def check_room(case: Case, world: World) -> Case | Refusal:
    """The tenant has room for the smallest request there is: who is far over its limits costs no tokenising."""
    limits, counters = _limits(case, world)
    least = cache.least_cost(case.routed) if _may_hit(case) else Cost(1)
    found = quota.lacking(counters, limits, least, case.requested_ms)
    return case if found is None else _over(found, case, world)


def check_quota(case: Case, world: World) -> Case | Refusal:
    """The tenant has room for prompt and answer in all its limits. What it reserves counts only if every other check passes, too."""
    limits, counters = _limits(case, world)
    hit, now_ms = case.hit, case.requested_ms
    cost = Cost(case.reserved_tokens) if hit is None else cache.hit_cost(case.routed, hit)
    found = quota.reserve(counters, limits, cost, now_ms)
    if isinstance(found, Exceeded):
        return _over(found, case, world)
    gauges = quota.gauges({**counters, **found.changed}, limits, now_ms)
    rates = quota.rates(gauges, now_ms) if gauges else None
    detail = f"{cost.tokens} tokens reserved, {len(gauges) or 'no'} limits"
    return case.noting("quota", PASSED, detail, reserved=found, limited=bool(gauges), rates=rates)


def crowded(case: Case, world: World) -> dict[str, int]:
    """By scope, how many of its tenant's requests must end before a refused one has room, if nothing else keeps it out (`quota.crowded`).

    Before it is tokenised only the answer's length is known of what it takes.
    """
    if case.hit is not None:
        cost = cache.hit_cost(case.routed, case.hit)
    elif case.deadline_ms:
        cost = Cost(case.reserved_tokens)
    else:
        cost = Cost(max(1, (case.request.sampling.max_tokens or 0) * case.request.sampling.n))
    limits, counters = _limits(case, world)
    return quota.crowded(counters, limits, cost, case.requested_ms)


def _limits(case: Case, world: World) -> tuple[Mapping[str, Quota], Counters]:
    """What limits a request, by scope, and what its tenant has used."""
    tenant = case.grant.tenant
    limits = _limits_for(quotas_of(tenant, case.tier, world), None, case.grant.key_id, case.routed.model)
    return limits, world.counters(case.source.partition, tenant)


def _over(found: Exceeded, case: Case, world: World) -> Refusal:
    """A refusal for want of room. What runs makes room when it ends: as soon as that may be, by how long requests of this model run."""
    limits, counters = _limits(case, world)
    told = quota.rates(quota.gauges(counters, limits, case.requested_ms), case.requested_ms)
    wait_ms = found.retry_after_ms
    if found.over:
        each_ms = waiting.service_ms(places.pool(case, world), case.now_ms, case.stale_ms)
        ended_ms = waiting.ended_ms(found.running, found.over, each_ms)
        wait_ms = min(max(ENDING_WAIT_MS, ended_ms), HELD_WAIT_MS)
    return Refusal(Reason.RATE_LIMITED, found.message, None, wait_ms, told, found.ending)


def quotas_of(tenant: str, tier: str, world: World) -> tuple[Quota, ...]:
    """The tenant's own quotas of the tier, or the default ones if it has none there; what is reserved for it is always its own."""
    own, default = world.tenant(tenant), world.tenant(DEFAULTS)
    return _in_force(own.quotas if own is not None else (), default.quotas if default is not None else (), tier)


_in_force = Remembered(quota.in_force, QUOTAS_KEPT)


def _limits_of(quotas: tuple[Quota, ...], _: None, key_id: str, model: str) -> Mapping[str, Quota]:
    return MappingProxyType(quota.limits_for(quotas, key_id, model))


_limits_for = Remembered(_limits_of, QUOTAS_KEPT)


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
    chosen = placement.place(
        request_id, topic, partitions, workers, world.ends, case.now_ms, case.stale_ms, case.beside
    )
    return case.noting("place", f"{topic}/{chosen.partition}", chosen.detail, partition=chosen.partition)


BEFORE_TOKENISING: tuple[tuple[str, Check], ...] = (
    ("reply", check_reply),
    ("grant", check_grant),
    ("validation", check_valid),
    ("route", check_route),
    ("signature", check_signature),
    ("quota", check_room),
)
RESOLVING: tuple[tuple[str, Check], ...] = (
    ("vocabulary", check_vocabulary),
    ("context", check_context),
    ("deadline", check_deadline),
)
PLACING: tuple[tuple[str, Check], ...] = (
    ("cache", check_cache),
    ("wait", check_wait),
    ("quota", check_quota),
    ("place", check_place),
)
AFTER_TOKENISING = (*RESOLVING, *PLACING)


def _may_hit(case: Case) -> bool:
    return bool(case.routed.cache_ttl_ms) and case.deterministic and case.policy.read


def _passed_unless(found: Problem | None, case: Case, check: str) -> Case | Refusal:
    if found is None:
        return case.noting(check)
    reason = Reason.PAYLOAD_TOO_LARGE if found.too_large else Reason.INVALID_REQUEST
    return Refusal(reason, found.message, found.param)


def _input_param(request: InferenceRequested) -> str:
    if request.messages is not None:
        return "messages"
    if request.inputs is not None:
        return "inputs"
    return "prompt" if request.prompt is not None else "prompt_token_ids"


def cancel_refusal(event: InferenceCancelled, grant: Grant, tier: str, now_ms: int) -> Refusal | None:
    """Why a cancel isn't taken, or None. All workers remember what was cancelled, so it must name what can be a request.

    A key that was revoked may still take back what it asked.
    """
    if not is_request_id(event.request_id):
        return Refusal(Reason.INVALID_REQUEST, "request_id must be a UUID of version 7 in lower case", "request_id")
    return _expired(grant, now_ms) or (_tier_refusal(tier) if tier not in grant.tiers else None)
