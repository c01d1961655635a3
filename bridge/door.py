"""The way of a call into the log and, when its caller leaves, the cancel that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from bridge.auth import Authenticator, Caller
from bridge.calls import Call, Leg
from bridge.errors import caller_param, stopping, unreachable
from bridge.event_ids import Shape
from bridge.resume import Resumed, Resumes, Wish
from bridge.streams import Dispatcher
from decisions.validation import problem
from infra.directory import ModelDirectory
from infra.log import EventProducer, NoSuchPartition, NotDelivered
from infra.settings import BridgeSettings
from infra.tracing import child
from schemas.errors import HeadraceError
from schemas.events import InferenceCancelled, InferenceRequested, Reply
from schemas.reasons import Reason
from schemas.topics import GRANT_HEADER, INTERACTIVE, TRACEPARENT_HEADER, TRACESTATE_HEADER, requests_topic

PRODUCE_WAIT_S = 5.0
"""How long the log may take to confirm a request before its caller hears that it can't be reached; less if its deadline is nearer."""
DEADLINE_GRACE_S = 2.0
"""How long after its deadline a call waits for the log's own ending, which knows better, before this bridge ends it."""
CANCELS_MAX = 10_000

End = Callable[[HeadraceError], None]
"""Ends what a caller has open, with the reason."""

_log = structlog.get_logger(__name__)
_TOPIC = requests_topic(INTERACTIVE)


@dataclass(eq=False)
class FrontDoor:
    """What the endpoints share. `draining` refuses new calls while those under way end."""

    settings: BridgeSettings
    auth: Authenticator
    models: ModelDirectory
    producer: EventProducer
    dispatcher: Dispatcher
    resumes: Resumes
    draining: bool = False
    _cancels: set[asyncio.Task[None]] = field(default_factory=set)
    _served: dict[Caller, set[End]] = field(default_factory=dict)

    @property
    def body_bytes_max(self) -> int:
        """The largest body taken: what travels inside a record, as there is no object store to put more in."""
        return min(self.settings.body_bytes_max, self.settings.inline_bytes_max)

    async def open(
        self,
        caller: Caller,
        requests: Sequence[InferenceRequested],
        http_headers: Mapping[str, str],
        arrived_s: float,
        *,
        streamed: Shape | None = None,
        outlives: bool = False,
    ) -> Call:
        """Put a call's requests, one a prompt, into the log and wait for their answers; `close` the call whatever happens.

        `streamed` is how the chunks of a streamed call look: its events get ids, unless it has several requests.
        Raises HeadraceError before anything reaches the log: invalid_request, payload_too_large, invalid_api_key, overloaded,
        unavailable.
        """
        self.auth.require(caller)
        for request in requests:
            self._check(request)
        self._let_in(len(requests))
        call = Call(self.settings.reader_pending_bytes_max, arrived_s, outlives=outlives)
        self.serve(caller, call.fail)
        if streamed is not None and len(requests) == 1:
            call.name = self.resumes.namer(streamed, caller.tenant, self.auth.reply)
        choice = 0
        for request in requests:
            self.dispatcher.register(call.add_leg(request.request_id, choice))
            choice += request.sampling.n
        timeout_ms = max(self._timeout_ms(request) for request in requests)
        try:
            await self._produce(call, caller, requests, http_headers, min(PRODUCE_WAIT_S, timeout_ms / 1000))
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

    def serve(self, caller: Caller, end: End) -> None:
        """Something is open for a caller now: `end` is called should its key be revoked, unless `served` comes first."""
        self._served.setdefault(caller, set()).add(end)

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

    def _check(self, request: InferenceRequested) -> None:
        found = problem(request, self.settings.inline_bytes_max)
        if found is not None:
            reason = Reason.PAYLOAD_TOO_LARGE if found.too_large else Reason.INVALID_REQUEST
            raise HeadraceError(reason, found.message, param=caller_param(found.param))

    async def _produce(
        self,
        call: Call,
        caller: Caller,
        requests: Sequence[InferenceRequested],
        http_headers: Mapping[str, str],
        wait_s: float,
    ) -> None:
        trace = [
            (name, value.encode())
            for name in (TRACEPARENT_HEADER, TRACESTATE_HEADER)
            if (value := http_headers.get(name))
        ]
        headers = [(GRANT_HEADER, self.auth.grant(caller)), *child(trace)]
        loop = asyncio.get_running_loop()
        pending = len(requests)
        too_late = loop.call_later(wait_s, call.fail, unreachable())

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
                    future = await self.producer.send(_TOPIC, request, key=caller.tenant, headers=headers)
                    future.add_done_callback(confirmed)
        except (TimeoutError, NotDelivered, NoSuchPartition) as error:
            _log.warning("a request was not taken by the log", error=repr(error))
            raise unreachable() from None

    def _set_deadline(self, call: Call, timeout_ms: int) -> None:
        error = HeadraceError(Reason.DEADLINE_EXCEEDED, f"no whole answer came within {timeout_ms} ms")
        loop = asyncio.get_running_loop()
        call.timer = loop.call_at(call.arrived_s + timeout_ms / 1000 + DEADLINE_GRACE_S, call.fail, error)

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
            if cancels and not leg.ended:
                self._cancel(leg, call.reply, caller)

    def _cancels_what_is_left(self, call: Call) -> bool:
        if call.error is None:  # its connection ended, by either side
            return not (call.outlives or (self.draining and call.name is not None))
        if call.error.reason in (Reason.CANCELLED, Reason.SLOW_READER):  # its caller left
            return not call.outlives
        return not call.resumed

    def _cancel(self, leg: Leg, reply: Reply | None, caller: Caller) -> None:
        if len(self._cancels) >= CANCELS_MAX:
            _log.error("a cancel was dropped: too many are under way", request_id=leg.request_id)
            return
        task = asyncio.create_task(self._send_cancel(leg.request_id, reply, caller), name="cancel")
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, cancelled_id: str, reply: Reply | None, caller: Caller) -> None:
        headers = [(GRANT_HEADER, self.auth.grant(caller, reply))]
        event = InferenceCancelled(cancelled_id, caller.tenant)
        try:
            await self.producer.send_and_wait(_TOPIC, event, key=caller.tenant, headers=headers)
        except Exception as error:  # whatever the client raises, nobody waits for it
            _log.warning("a cancel was not taken by the log", request_id=cancelled_id, error=repr(error))

    async def stop(self, timeout_s: float = PRODUCE_WAIT_S) -> None:
        """Wait for the cancels under way."""
        if self._cancels:
            await asyncio.wait(set(self._cancels), timeout=timeout_s)
