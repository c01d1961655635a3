"""What can be asked again of a record that was put aside."""

from __future__ import annotations

from dataclasses import replace

from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, InferenceScheduled, PayloadStored, Sampling
from schemas.payloads import refusal
from schemas.reasons import Reason
from schemas.topics import TIERS, requests_topic


def asked_again(event: object, request_id: str) -> InferenceRequested:
    """The request in a record, under a new id: its own may have been answered, and what is closed stays closed.

    Scheduled work is asked with the token ids that it had. Raises HeadraceError (invalid_request) for whatever is neither.
    """
    match event:
        case InferenceRequested():
            return replace(event, request_id=request_id, door="")  # nobody watches it
        case InferenceScheduled():
            return InferenceRequested(
                request_id,
                event.model,
                prompt_token_ids=event.prompt_token_ids if event.inputs is None else None,
                sampling=event.sampling if event.inputs is None else Sampling(),
                stream=event.stream,
                inputs=event.inputs,
                outputs=event.outputs,
                parameters=event.parameters,
            )
        case None:
            raise HeadraceError(Reason.INVALID_REQUEST, "it is no event, so there is nothing to ask again; drop it")
        case _:
            raise _no_request(type(event).__name__)


def followed(reference: PayloadStored, tenant: str) -> None:
    """Returns if a record's reference may be read to ask it again for this tenant.

    It names a place of the tenant's own, and holds a request or scheduled work. Raises HeadraceError (invalid_request, permission_denied,
    payload_too_large).
    """
    kinds = {kind.__name__: kind for kind in (InferenceRequested, InferenceScheduled)}
    if reference.event not in kinds:
        raise _no_request(reference.event)
    if (unfollowed := refusal(reference, tenant, kinds[reference.event])) is not None:
        raise unfollowed


def _no_request(name: str) -> HeadraceError:
    text = f"{name} is no request, so there is nothing to ask again; drop it"
    return HeadraceError(Reason.INVALID_REQUEST, text)


def tier_of(topic: str, event: object) -> str:
    """The tier in which a record was asked. Raises HeadraceError (invalid_request) if neither its topic nor the event says."""
    if isinstance(event, InferenceScheduled):
        return event.tier
    for tier in TIERS:
        if topic == requests_topic(tier):
            return tier
    raise HeadraceError(Reason.INVALID_REQUEST, f"{topic} belongs to no tier, so nothing can be asked again there")


def tenant_of(key: bytes | None, event: object) -> str | None:
    """Whose record it was, as far as it says: scheduled work names its tenant, a request's key does by custom, and a reference if nothing else does."""
    if isinstance(event, InferenceScheduled):
        return event.tenant
    if isinstance(event, PayloadStored) and (key is None or event.event == InferenceScheduled.__name__):
        return event.tenant
    return None if key is None else key.decode(errors="replace")
