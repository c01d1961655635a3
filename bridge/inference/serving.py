"""A request's way through the door: checked against what its model takes, put into the log, and its answer waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from bridge.auth import Caller
from bridge.body import PARSED_AT_ONCE_BYTES
from bridge.cached import CONTROL_FIELD, with_control
from bridge.calls import Call, Update, new_request_id
from bridge.door import FrontDoor
from bridge.errors import stopping
from bridge.inference.asking import BYTES_MAX, Answer, Ask, Scalar
from bridge.inference.elements import BF16
from bridge.inference.generation import Generation, Texts, read_generation, usage_parameters
from bridge.inference.models import find, outputs_of, takes_tensors
from bridge.inference.parameters import Wishes
from bridge.observe import Observer
from decisions.problem import Problem
from decisions.signature import WISHES, input_problem, unfit
from schemas.errors import HeadraceError
from schemas.events import InferenceRequested, ModelVersionRegistered
from schemas.parts import Tensor
from schemas.reasons import Reason


class Serving:
    """One request that is in the log. `close` it whatever happens; what the log hasn't ended then is cancelled."""

    def __init__(
        self, door: FrontDoor, caller: Caller, call: Call, ask: Ask, generation: Generation | None, protocol: str
    ) -> None:
        self.call = call
        self._door = door
        self._caller = caller
        self._ask = ask
        self._generation = generation
        self._observer = Observer(call, protocol)
        self._closed = False

    def close(self) -> None:
        """It is over; only the first time counts."""
        if not self._closed:
            self._closed = True
            self._observer.finish()
            self._door.close(self.call, self._caller)

    def cut(self) -> HeadraceError:
        """The server gives it up, since it stops."""
        self.call.fail(stopping())
        self.close()
        return stopping()

    async def whole(self) -> Answer:
        """The answer, once it is there. Raises HeadraceError: what the request failed with, answer_too_large."""
        if self._generation is None:
            while not (await self._next()).done:
                pass
            return self._answer(self.call.legs[0].outputs, {})
        texts = Texts(self._generation)
        done = False
        while not done:
            update = await self._next()
            texts.add(update.deltas)
            done = update.done
        return self._answer(texts.take(), usage_parameters(self.call))

    async def parts(self) -> AsyncIterator[Answer]:
        """The answer as it grows, or in one part if no stream is wanted. Raises HeadraceError: what the request failed with."""
        if self._generation is None or not self._generation.streams:
            yield await self.whole()
            return
        texts = Texts(self._generation)
        done = False
        while not done:
            update = await self._next()
            texts.add(update.deltas)
            done = update.done
            answer = self._answer(texts.take(), usage_parameters(self.call) if done else {})
            yield replace(answer, final=done)
            self._observer.sent(update)

    async def _next(self) -> Update:
        await self.call.wait()
        update = self.call.take()
        if update.error is not None:
            raise update.error
        return update

    def _answer(self, outputs: tuple[Tensor, ...], parameters: Mapping[str, Scalar]) -> Answer:
        if self._ask.outputs:
            given = {tensor.name: tensor for tensor in outputs}
            missing = next((wanted.name for wanted in self._ask.outputs if wanted.name not in given), None)
            if missing is not None:
                raise HeadraceError(Reason.ENGINE_ERROR, f"the model gave no output `{missing}`")
            outputs = tuple(given[wanted.name] for wanted in self._ask.outputs)
        if sum(len(tensor.data) for tensor in outputs) > BYTES_MAX:
            raise HeadraceError(Reason.ANSWER_TOO_LARGE, f"the outputs have more than {BYTES_MAX} bytes")
        served = self.call.served
        version = "" if served is None else served.version
        return Answer(self._ask.model, version, self._ask.id, outputs, parameters)


async def begin(
    door: FrontDoor,
    caller: Caller,
    ask: Ask,
    wishes: Wishes,
    headers: Mapping[str, str],
    arrived_s: float,
    *,
    protocol: str,
    outlives: bool = False,
    json: bool = False,
    parts: bool = False,
) -> Serving:
    """Put a request into the log. `json` says that its outputs are told in JSON where they aren't asked for as binary data, `parts` that it may be
    answered part by part.

    Raises HeadraceError before anything reaches the log: model_not_found, invalid_request, unsupported_parameter, payload_too_large, overloaded,
    unavailable.
    """
    version = find(door.models, ask.model, ask.version)
    generation = None
    tensors = takes_tensors(version)
    large = sum(len(tensor.data) for tensor in ask.inputs) > PARSED_AT_ONCE_BYTES
    if tensors:
        request = (
            await asyncio.to_thread(_tensor_request, version, ask, wishes)
            if large
            else _tensor_request(version, ask, wishes)
        )
        if json:
            _require_told(version, ask)
    else:
        generation = await asyncio.to_thread(_generation, ask, wishes) if large else _generation(ask, wishes)
        if generation.streams and not parts:
            text = "a stream is asked for by gRPC's ModelStreamInfer, or generate_stream"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param="stream")
        request = generation.request
    requests = with_control([request], wishes.cache_control, CONTROL_FIELD)
    call = await door.open(
        caller,
        requests,
        headers,
        arrived_s,
        outlives=outlives,
        idempotency_key=wishes.idempotency_key,
        tier=wishes.tier,
        inputs_checked=tensors,
    )
    return Serving(door, caller, call, ask, generation, protocol)


def _generation(ask: Ask, wishes: Wishes) -> Generation:
    _require(input_problem(ask.inputs, (), {}) if ask.inputs else None)
    return read_generation(ask, wishes.model, wishes.timeout_ms)


def _tensor_request(version: ModelVersionRegistered, ask: Ask, wishes: Wishes) -> InferenceRequested:
    request = InferenceRequested(
        request_id=new_request_id(),
        model=ask.model,
        timeout_ms=wishes.timeout_ms,
        stream=False,
        inputs=ask.inputs,
        outputs=tuple(wanted.name for wanted in ask.outputs),
        parameters={name: _as_text(value) for name, value in wishes.model.items()},
    )
    _require(input_problem(ask.inputs, request.outputs, request.parameters))
    _require(unfit(request, version))
    known = WISHES.get(version.processor, ())
    for name in wishes.model:
        if name not in known:
            served = f"; it takes {', '.join(known)}" if known else ""
            text = f"{name} is not a parameter of the model `{version.model}`{served}"
            raise HeadraceError(Reason.UNSUPPORTED_PARAMETER, text, param=f"parameters.{name}")
    return request


def _require(found: Problem | None) -> None:
    """Raises HeadraceError (invalid_request) for a problem."""
    if found is not None:
        raise HeadraceError(Reason.INVALID_REQUEST, found.message, param=found.param)


def _require_told(version: ModelVersionRegistered, ask: Ask) -> None:
    """What can't be told in JSON is refused before the model runs."""
    binary = {wanted.name: wanted.binary for wanted in ask.outputs}
    for spec in outputs_of(version):
        told = ask.binary if binary.get(spec.name) is None else binary[spec.name]
        if spec.datatype == BF16 and not told and (not ask.outputs or spec.name in binary):
            text = f"the output `{spec.name}` is {BF16}, which has no form in JSON; ask for it as binary data"
            raise HeadraceError(Reason.INVALID_REQUEST, text, param="outputs")


def _as_text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
