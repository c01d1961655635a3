"""The way of a call into the log and, when its caller leaves, the cancel that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from bridge.auth import Authenticator, Caller
from bridge.body import PARSED_AT_ONCE_BYTES
from bridge.calls import Call, Leg
from bridge.errors import caller_param, stopping, store_away, unreachable
from bridge.event_ids import Shape
from bridge.idempotency import with_key
from bridge.presence import Presence
from bridge.resume import Place, Resumed, Resumes, Wish
from bridge.streams import Dispatcher
from decisions.validation import problem
from infra.directory import ModelDirectory, WorkerDirectory
from infra.log import EventProducer, NoSuchPartition, NotDelivered
from infra.objects import StoreAway
from infra.settings import BridgeSettings
from infra.tracing import child
from schemas.errors import HeadraceError
from schemas.events import InferenceCancelled, InferenceRequested, Reply
from schemas.payloads import may_be_large
from schemas.reasons import Reason
from schemas.topics import BATCH, GRANT_HEADER, INTERACTIVE, TRACEPARENT_HEADER, TRACESTATE_HEADER, requests_topic

PRODUCE_WAIT_S = 5.0
"""How long the log may take to confirm a request before its caller hears that it can't be reached; less if its deadline is nearer."""
DEADLINE_GRACE_S = 2.0
"""How long after its deadline a call waits for the log's own ending, which knows better, before this bridge ends it."""
CANCELS_MAX = 10_000

End = Callable[[HeadraceError], None]
"""Ends what a caller has open, with the reason."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class FrontDoor:
    """What the endpoints share. `draining` refuses new calls while those under way end. `presence.run` is to run meanwhile."""

    settings: BridgeSettings
    auth: Authenticator
    models: ModelDirectory
    workers: WorkerDirectory
    producer: EventProducer
    dispatcher: Dispatcher
    resumes: Resumes
    draining: bool = False
    presence: Presence = field(init=False)
    _cancels: set[asyncio.Task[None]] = field(default_factory=set)
    _served: dict[Caller, set[End]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Whatever is open is told of."""
        self.presence = Presence(self.producer, lambda: len(self.dispatcher) + len(self.resumes), self.resumes.followed)
        self.resumes.on_followed = self.presence.adopting

    async def open(
        self,
        caller: Caller,
        requests: Sequence[InferenceRequested],
        http_headers: Mapping[str, str],
        arrived_s: float,
        *,
        streamed: Shape | None = None,
        outlives: bool = False,
        idempotency_key: str = "",
        tier: str = INTERACTIVE,
        inputs_checked: bool = False,
    ) -> Call:
        """Put a call's requests, one a prompt, into the log and wait for their answers; `close` the call whatever happens.

        `streamed` is how the chunks of a streamed call look: its events get ids, unless it has several requests. What was asked before
        under the same `idempotency_key` is answered by that one's streams. The caller's key must allow the `tier`.
        `inputs_checked` says that `input_problem` found nothing wrong with the requests' tensors.
        Raises HeadraceError before anything reaches the log: invalid_request, payload_too_large, invalid_api_key, overloaded,
        unavailable.
        """
        self.auth.require(caller)
        for request in requests:
            if not inputs_checked and sum(len(tensor.data) for tensor in request.inputs or ()) > PARSED_AT_ONCE_BYTES:
                await asyncio.to_thread(self._check, request, inputs_checked)
            else:
                self._check(request, inputs_checked)
        self._let_in(len(requests))
        requests = self.presence.watching(with_key(requests, idempotency_key), outlives=outlives)
        call = Call(self.settings.reader_pending_bytes_max, arrived_s, outlives=outlives, keyed=bool(idempotency_key))
        call.tier, call.tenant = tier, caller.tenant
        self.serve(caller, call.fail)
        if streamed is not None and len(requests) == 1:
            call.shape = streamed
            call.name = self.resumes.namer(streamed, caller.tenant, self.auth.reply)
        choice = 0
        for request in requests:
            self.dispatcher.register(call.add_leg(request.request_id, choice))
            choice += request.sampling.n
        timeout_ms = max(self._timeout_ms(request) for request in requests)
        try:
            stored = await self._stored(requests, caller, timeout_ms / 1000)
            await self._produce(call, caller, requests, stored, http_headers, timeout_ms)
        except BaseException:
            self.close(call, caller)
            raise
        self._set_deadline(call, timeout_ms)
        return call

    async def resume(self, caller: Caller, wish: Wish, arrived_s: float) -> Resumed:
        """Take a stream up again; `close` its call whatever happens.

        Raises HeadraceError: invalid_request, not_found, invalid_api_key, overloaded, unavailable, and what the request was refused for.
        """
        self.auth.require(caller)
        self._let_in(1)
        resumed = await self.resumes.open(caller.tenant, wish, arrived_s)
        self.serve(caller, resumed.call.fail)
        return resumed

    async def cancel(self, caller: Caller, request_id: str) -> None:
        """Stop a request of the caller's tenant, whoever waits for it; one that has ended stays as it is. Of a repeat, the first is stopped.

        Raises HeadraceError: not_found if the tenant has no such request; permission_denied if the key may not use its tier; invalid_api_key,
        unavailable.
        """
        self.auth.require(caller)
        if self.draining:
            raise stopping()
        place = self._open_place(caller, request_id) or await self._place(caller, request_id)
        if place is None:
            return
        if place.tier not in caller.tiers:
            raise HeadraceError(Reason.PERMISSION_DENIED, f"the API key may not make {place.tier} calls")
        try:
            async with asyncio.timeout(PRODUCE_WAIT_S):
                await self._put_cancel(place.request_id, requests_topic(place.tier), place.reply, caller)
        except (TimeoutError, NotDelivered, NoSuchPartition) as error:
            _log.warning("a cancel was not taken by the log", request_id=request_id, error=repr(error))
            raise unreachable() from None

    async def _place(self, caller: Caller, request_id: str) -> Place | None:
        """By what was decided of a request; where nothing is yet, by its own record on one of the tiers that the key opens."""
        try:
            return await self.resumes.place(caller.tenant, request_id)
        except HeadraceError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            tiers = [tier for tier in (INTERACTIVE, BATCH) if tier in caller.tiers]
            place = await self.resumes.undecided(caller.tenant, request_id, tiers)
            if place is None:
                raise
            return place

    def _open_place(self, caller: Caller, request_id: str) -> Place | None:
        """A request that this bridge itself has open: it may still wait for its turn, and then `lifecycle` knows nothing of it."""
        for leg in self.dispatcher.legs(request_id):
            if leg.call.tenant == caller.tenant:
                return Place(request_id, leg.call.tier, self.auth.reply)
        return None

    def serve(self, caller: Caller, end: End) -> None:
        """Something is open for a caller now: `end` is called should its key be revoked, unless `served` comes first.

        That is at once for a key that was revoked while this was being opened, which nobody was told of.
        """
        self._served.setdefault(caller, set()).add(end)
        try:
            self.auth.require(caller)
        except HeadraceError as error:
            end(error)

    def served(self, caller: Caller, end: End) -> None:
        """What was open is closed."""
        ends = self._served.get(caller)
        if ends is not None:
            ends.discard(end)
            if not ends:
                del self._served[caller]

    async def end_the_revoked(self) -> None:
        """Ends what is open for callers whose keys are revoked, as soon as that becomes known. Runs until it is cancelled."""
        while True:
            await self.auth.change()
            for caller in list(self._served):
                try:
                    self.auth.require(caller)
                except HeadraceError as error:
                    ends = self._served.get(caller, set())
                    _log.info("a key is revoked", tenant=caller.tenant, key_id=caller.key_id, open=len(ends))
                    for end in list(ends):
                        end(error)

    def _let_in(self, requests: int) -> None:
        if self.draining:
            raise stopping()
        if len(self.dispatcher) + len(self.resumes) + requests > self.settings.open_requests_max:
            raise HeadraceError(Reason.OVERLOADED, "this front door holds all the calls it can", retry_after_ms=1000)

    def _check(self, request: InferenceRequested, inputs_checked: bool) -> None:
        found = problem(request, self.settings.body_bytes_max, inputs_checked=inputs_checked)
        if found is not None:
            reason = Reason.PAYLOAD_TOO_LARGE if found.too_large else Reason.INVALID_REQUEST
            raise HeadraceError(reason, found.message, param=caller_param(found.param))

    async def _stored(self, requests: Sequence[InferenceRequested], caller: Caller, wait_s: float) -> dict[str, bytes]:
        """By their ids, the records of large requests. What is too large for a record goes to the object store now."""
        large = [request for request in requests if may_be_large(request)]
        if not large:
            return {}
        try:
            async with asyncio.timeout(wait_s):
                return {
                    request.request_id: await self.producer.encoded(request, owner=caller.tenant) for request in large
                }
        except (TimeoutError, StoreAway) as error:
            _log.warning("a request was not taken by the object store", error=repr(error))
            raise store_away() from None

    async def _produce(
        self,
        call: Call,
        caller: Caller,
        requests: Sequence[InferenceRequested],
        stored: Mapping[str, bytes],
        http_headers: Mapping[str, str],
        timeout_ms: int,
    ) -> None:
        wait_s = min(PRODUCE_WAIT_S, timeout_ms / 1000)
        trace = [
            (name, value.encode())
            for name in (TRACEPARENT_HEADER, TRACESTATE_HEADER)
            if (value := http_headers.get(name))
        ]
        headers = [(GRANT_HEADER, self.auth.grant(caller)), *child(trace)]
        topic = requests_topic(call.tier)
        loop = asyncio.get_running_loop()
        pending = len(requests)
        too_late = loop.call_later(wait_s, lambda: call.fail(self._not_taken(timeout_ms)))

        def confirmed(future: asyncio.Future[object]) -> None:
            nonlocal pending
            pending -= 1
            if future.cancelled() or future.exception() is not None:
                _log.warning(
                    "a request was not taken by the log", error=None if future.cancelled() else repr(future.exception())
                )
                call.fail(unreachable())
            if pending == 0:
                too_late.cancel()

        try:
            async with asyncio.timeout(wait_s):
                for request in requests:
                    if (record := stored.get(request.request_id)) is not None:
                        key = caller.tenant.encode()
                        future = await self.producer.send_raw(topic, record, key, headers=headers)
                    else:
                        future = await self.producer.send(topic, request, key=caller.tenant, headers=headers)
                    future.add_done_callback(confirmed)
        except TimeoutError:
            raise self._not_taken(timeout_ms) from None
        except (NotDelivered, NoSuchPartition) as error:
            _log.warning("a request was not taken by the log", error=repr(error))
            raise unreachable() from None

    def _not_taken(self, timeout_ms: int) -> HeadraceError:
        """Why the log hasn't confirmed a request in time: it is away, or its caller gave it less time than that takes."""
        if timeout_ms < PRODUCE_WAIT_S * 1000 and self.producer.failure is None:
            return _late(timeout_ms)
        _log.warning("a request was not taken by the log", error="it doesn't answer")
        return unreachable()

    def _set_deadline(self, call: Call, timeout_ms: int) -> None:
        loop = asyncio.get_running_loop()
        call.timer = loop.call_at(call.arrived_s + timeout_ms / 1000 + DEADLINE_GRACE_S, call.fail, _late(timeout_ms))

    def _timeout_ms(self, request: InferenceRequested) -> int:
        if request.timeout_ms is not None:
            return request.timeout_ms
        registered = self.models.resolve(request.model)
        return self.settings.deadline_default_ms if registered is None else registered.default_timeout_ms

    def close(self, call: Call, caller: Caller) -> None:
        """Free what a call holds; requests that the log hasn't ended and nobody may come back for are cancelled, in the background."""
        cancels = self._cancels_what_is_left(call)
        self.served(caller, call.fail)
        call.release()
        for leg in call.legs:
            self.dispatcher.unregister(leg)
            if cancels and not (leg.ended or leg.joined):
                self._cancel(leg, call.reply, caller)

    def _cancels_what_is_left(self, call: Call) -> bool:
        if call.error is None:  # its connection ended, by either side
            return not (call.outlives or (self.draining and call.name is not None))
        if call.error.reason in (Reason.CANCELLED, Reason.SLOW_READER):  # its caller left
            return not call.outlives
        if call.error.reason is Reason.INVALID_API_KEY:  # admission ends what was asked with it, and says why
            return False
        if (
            call.keyed and call.error.reason is Reason.UNAVAILABLE
        ):  # its caller comes again for what the log may have taken
            return False
        return not call.resumed

    def _cancel(self, leg: Leg, reply: Reply | None, caller: Caller) -> None:
        if len(self._cancels) >= CANCELS_MAX:
            _log.error("a cancel was dropped: too many are under way", request_id=leg.request_id)
            return
        topic = requests_topic(leg.call.tier)
        task = asyncio.create_task(self._send_cancel(leg.request_id, topic, reply, caller), name="cancel")
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, cancelled_id: str, topic: str, reply: Reply | None, caller: Caller) -> None:
        try:
            await self._put_cancel(cancelled_id, topic, reply, caller)
        except Exception as error:  # whatever the client raises, nobody waits for it
            _log.warning("a cancel was not taken by the log", request_id=cancelled_id, error=repr(error))

    async def _put_cancel(self, cancelled_id: str, topic: str, reply: Reply | None, caller: Caller) -> None:
        headers = [(GRANT_HEADER, self.auth.grant(caller, reply))]
        event = InferenceCancelled(cancelled_id, caller.tenant)
        await self.producer.send_and_wait(topic, event, key=caller.tenant, headers=headers)

    async def stop(self, timeout_s: float = PRODUCE_WAIT_S) -> None:
        """Wait for the cancels under way."""
        if self._cancels:
            await asyncio.wait(set(self._cancels), timeout=timeout_s)


def _late(timeout_ms: int) -> HeadraceError:
    return HeadraceError(Reason.DEADLINE_EXCEEDED, f"no whole answer came within {timeout_ms} ms")
