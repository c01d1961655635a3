"""What a verdict of admission becomes: the work, and the records that tell of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decisions import cache
from decisions.cases import Case, Grant, Refusal, World
from decisions.endings import ADMISSION
from decisions.ledger import ALL_KEYS_AND_MODELS
from decisions.presence import DOOR_CHARS_MAX
from schemas.events import (
    InferenceAdmitted,
    InferenceCancelled,
    InferenceFailed,
    InferenceRejected,
    InferenceScheduled,
    ModelVersionRegistered,
    Position,
)
from schemas.ids import REQUEST_ID_CHARS
from schemas.reasons import Reason
from schemas.topics import work_topic

MESSAGE_CHARS_MAX = 1_000
"""A refusal may quote the caller; no more than this of it travels."""
CANCEL = "cancel"
"""The source of the ending that a cancel is."""
YIELDED_TEXT = "Its front door is gone, and its tenant's next call took its slot."
REVOKED_TEXT = "The API key that it was asked with is revoked."


def scheduled(case: Case) -> InferenceScheduled:
    """The work."""
    request, policy = case.request, case.policy
    stored = bool(case.cache_key) and policy.store
    return InferenceScheduled(
        request_id=request.request_id,
        tier=case.tier,
        deadline_ms=case.deadline_ms,
        requested_ms=case.requested_ms,
        reply=case.grant.reply,
        stream=request.stream,
        source=case.source,
        time_limit_ms=case.routed.time_limit_ms,
        rates=case.rates,
        cache_key=case.cache_key if stored else "",
        shared=stored and policy.shares,
        **_shaping(case),
    )


def _shaping(case: Case) -> dict[str, Any]:
    """The fields of the work that shape its answer."""
    request, version, sampling = case.request, case.routed, case.request.sampling
    if sampling.max_tokens != case.max_tokens:
        sampling = replace(sampling, max_tokens=case.max_tokens)
    return {
        "tenant": case.grant.tenant,
        "model": version.model,
        "version": version.version,
        "prompt_token_ids": case.prompt_token_ids,
        "sampling": sampling,
        "cache_salt": case.cache_salt,
        "inputs": case.inputs,
        "outputs": request.outputs,
        "parameters": request.parameters,
        "prompt_tokens": case.prompt_tokens if case.inputs is not None else 0,
    }


def admitted(case: Case, valid_until_ms: int = 0) -> tuple[InferenceScheduled, InferenceAdmitted]:
    """The work, and the record of letting it in, which counts if the log has it by `valid_until_ms`; 0: whenever."""
    request, grant, version = case.request, case.grant, case.routed
    return scheduled(case), InferenceAdmitted(
        request_id=request.request_id,
        tenant=grant.tenant,
        key_id=grant.key_id,
        model=version.model,
        version=version.version,
        tier=case.tier,
        reply=grant.reply,
        work_topic=work_topic(version.model, version.version, case.tier),
        work_partition=case.partition,
        prompt_tokens=case.prompt_tokens,
        max_tokens=case.max_tokens,
        reserved_tokens=case.reserved_tokens,
        requested_ms=case.requested_ms,
        deadline_ms=case.deadline_ms,
        source=case.source,
        decisions=case.decisions,
        time_limit_ms=version.time_limit_ms,
        scopes=case.reserved.hold.scopes if case.reserved is not None else (ALL_KEYS_AND_MODELS,),
        keyed=case.keyed,
        cached=case.hit is not None,
        valid_until_ms=valid_until_ms,
        door=request.door if len(request.door) <= DOOR_CHARS_MAX else "",
    )


def as_decided(case: Case, verdict: InferenceAdmitted, version: ModelVersionRegistered, world: World) -> Case:
    """A tokenised case with what was decided of it before, and the name of its answer in the response cache."""
    tenant = world.tenant(case.grant.tenant)
    return named_for_cache(
        replace(
            case,
            cache_salt=tenant.cache_salt if tenant is not None else "",
            version=version,
            max_tokens=verdict.max_tokens,
            deadline_ms=verdict.deadline_ms,
            partition=verdict.work_partition,
        )
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


def cancelled(event: InferenceCancelled, grant: Grant, tier: str) -> tuple[InferenceFailed, InferenceCancelled]:
    """The ending for the reply partition, and the word for all workers. Both carry the tenant, for readers to compare with the request's.

    `tier` is empty if it isn't known: whoever has the request open takes it for its own.
    """
    return _ended(event.request_id, grant.tenant, tier, Reason.CANCELLED, Reason.CANCELLED.text)


def yielded(request_id: str, tenant: str, tier: str) -> tuple[InferenceFailed, InferenceCancelled]:
    """The same of a request that nobody watches any more, and whose slot another of its tenant needs."""
    return _ended(request_id, tenant, tier, Reason.CANCELLED, YIELDED_TEXT)


def revoked(request_id: str, tenant: str, tier: str) -> tuple[InferenceFailed, InferenceCancelled]:
    """The same of a request whose key was revoked after it was let in: whoever follows it hears so, whatever else has heard of the revocation."""
    return _ended(request_id, tenant, tier, Reason.INVALID_API_KEY, REVOKED_TEXT)


def _ended(
    request_id: str, tenant: str, tier: str, reason: Reason, message: str
) -> tuple[InferenceFailed, InferenceCancelled]:
    ending = InferenceFailed(
        request_id=request_id,
        tenant=tenant,
        model="",
        version="",
        tier=tier,
        reason=reason.value,
        message=message,
        source=CANCEL,
    )
    return ending, InferenceCancelled(request_id, tenant)


def taken_back(rejected: InferenceRejected) -> InferenceFailed:
    """The ending that follows the refusal of what is let in already: it counts if no worker has begun, and gives back what was reserved."""
    return InferenceFailed(
        request_id=rejected.request_id,
        tenant=rejected.tenant,
        model=rejected.model,
        version="",
        tier=rejected.tier,
        reason=rejected.reason,
        message=rejected.message,
        if_not_started=True,
        source=ADMISSION,
    )


def unwanted(event: InferenceCancelled, tenant: str, tier: str, model: str, source: Position) -> InferenceRejected:
    """The record, for `lifecycle` alone, that a request of this place was cancelled before anything was decided of it: should its record come
    again, however late, that is known.
    """
    reason = Reason.CANCELLED
    return InferenceRejected(event.request_id, tenant, model, tier, reason.value, reason.text, source=source)


def named_for_cache(case: Case) -> Case:
    """The case with the name of its answer in the response cache. Only after the checks `RESOLVING`: all that shapes the answer is settled then."""
    version, policy = case.routed, case.policy
    if not version.cache_ttl_ms or not case.deterministic or not (policy.read or policy.store):
        return case
    return case.having(cache_key=cache.key(_shaping(case), version))
