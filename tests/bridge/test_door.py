"""The way into the log: what happens when it is closed, full or slow. The broker here is a fake that fails on command."""

from __future__ import annotations

import asyncio
import hashlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.auth import Authenticator, Caller
from bridge.calls import Call
from bridge.door import FrontDoor
from bridge.event_ids import EventIds
from bridge.openai_chat import ChatCall
from bridge.resume import Resumes, Wish
from bridge.streams import Dispatcher
from infra.directory import ModelDirectory, TenantDirectory, WorkerDirectory
from infra.grants import read
from infra.log import EventDecoder, NotDelivered
from infra.settings import BridgeSettings, KafkaSettings
from schemas.errors import HeadraceError
from schemas.events import ApiKey, InferenceCancelled, InferenceRequested, Reply, TenantChanged
from schemas.reasons import Reason

SECRET = b"0123456789abcdef0123456789abcdef"
CALLER = Caller("t", "k", ("interactive",))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class FakeProducer:
    """Takes records as `mode` says: `ok`, `raise`, `fail` (the future), `hang` (neither)."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.failure: str | None = None
        self.sent: list[Any] = []

    async def send(self, _topic: str, event: Any, **_options: Any) -> asyncio.Future[None]:
        if self.mode == "hang" and isinstance(event, InferenceRequested):
            await asyncio.Event().wait()
        if self.mode == "raise":
            raise NotDelivered("out of reach")
        self.sent.append(event)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.mode == "fail":
            future.set_exception(NotDelivered("out of reach"))
        elif self.mode != "unconfirmed":
            future.set_result(None)
        return future

    async def send_and_wait(self, topic: str, event: Any, **options: Any) -> None:
        await (await self.send(topic, event, **options))


@pytest.fixture
async def producer() -> FakeProducer:
    return FakeProducer()


class FakeTenants(TenantDirectory):
    """One tenant, whose key may be revoked."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings())
        self.learn()

    def learn(self, revoked_ms: int | None = None, name: str = CALLER.tenant) -> None:
        key = ApiKey(CALLER.key_id, "0" * 64, CALLER.tiers, 1, revoked_ms)
        self._on_event(TenantChanged(name, "salt", (key,), 1), SimpleNamespace(timestamp=10))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@pytest.fixture
async def tenants() -> FakeTenants:
    return FakeTenants()


@pytest.fixture
async def door(producer: FakeProducer, tenants: FakeTenants) -> FrontDoor:
    kafka = KafkaSettings()
    settings = BridgeSettings(open_requests_max=2)
    auth = Authenticator(tenants, SECRET, Reply("tokens", 1), 10_000)
    decoder = EventDecoder(kafka)
    dispatcher = Dispatcher(kafka, 1, decoder)
    resumes = Resumes(settings, dispatcher, decoder, EventIds(SECRET), auth.reply_of)
    models, workers = ModelDirectory(kafka), WorkerDirectory(kafka)
    return FrontDoor(settings, auth, models, workers, producer, dispatcher, resumes)  # type: ignore[arg-type]


def requests(**fields: Any) -> list[InferenceRequested]:
    return ChatCall({**CHAT, **fields}).requests


@pytest.mark.parametrize("mode", ["raise", "hang"])
async def test_a_log_out_of_reach_is_told_in_bounded_time(
    door: FrontDoor, producer: FakeProducer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("bridge.door.PRODUCE_WAIT_S", 0.02)
    producer.mode = mode
    with pytest.raises(HeadraceError) as caught:
        await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    assert caught.value.reason is Reason.UNAVAILABLE
    assert caught.value.retry_after_ms is not None
    assert len(door.dispatcher) == 0
    await door.stop()


@pytest.mark.parametrize("mode", ["fail", "unconfirmed"])
async def test_a_record_that_is_never_confirmed_fails_its_call(
    door: FrontDoor, producer: FakeProducer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("bridge.door.PRODUCE_WAIT_S", 0.02)
    producer.mode = mode
    call = await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    with pytest.raises(HeadraceError) as caught:
        await call.verdict()
    assert caught.value.reason is Reason.UNAVAILABLE
    producer.mode = "ok"
    door.close(call, CALLER)
    await door.stop()
    assert producer.sent[-1] == InferenceCancelled(call.request_id, "t")  # it may be in the log all the same


@pytest.mark.parametrize(
    ("failure", "reason"), [(None, Reason.DEADLINE_EXCEEDED), ("Kafka doesn't answer", Reason.UNAVAILABLE)]
)
async def test_who_gives_less_time_than_the_log_takes_hears_of_the_deadline(
    door: FrontDoor, producer: FakeProducer, failure: str | None, reason: Reason
) -> None:
    producer.failure = failure
    for mode in ("hang", "unconfirmed"):
        producer.mode = mode
        with pytest.raises(HeadraceError) as caught:
            call = await door.open(CALLER, requests(timeout=0.02), {}, asyncio.get_running_loop().time())
            await call.verdict()
        assert caught.value.reason is reason
    await door.stop()


async def test_what_a_revoked_key_has_open_ends(door: FrontDoor, producer: FakeProducer, tenants: FakeTenants) -> None:
    watching = asyncio.create_task(door.end_the_revoked())
    call = await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    told: list[HeadraceError] = []
    door.serve(CALLER, told.append)
    await asyncio.sleep(0)
    tenants.learn(name="another")
    await asyncio.sleep(0)
    assert not told
    tenants.learn(revoked_ms=2)
    with pytest.raises(HeadraceError, match="revoked"):
        await call.verdict()
    assert [error.reason for error in told] == [Reason.INVALID_API_KEY]
    door.close(call, CALLER)
    door.served(CALLER, told.append)
    assert not door._served
    with pytest.raises(HeadraceError, match="revoked"):
        await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    watching.cancel()
    await door.stop()
    (asked,) = producer.sent
    assert asked.request_id == call.request_id, "whoever decides the request ends it, with the true reason"


async def test_what_was_opened_while_its_key_was_revoked_ends_at_once(
    door: FrontDoor, producer: FakeProducer, tenants: FakeTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The news came between two looks: nothing was open yet, and no other news follows."""
    watching = asyncio.create_task(door.end_the_revoked())
    call = Call(1_000, asyncio.get_running_loop().time(), resumed=True)
    door.dispatcher.register(call.add_leg("r", 0))

    async def revoked_meanwhile(*_: Any) -> Any:
        tenants.learn(revoked_ms=2)
        await asyncio.sleep(0)
        return SimpleNamespace(call=call)

    monkeypatch.setattr(door.resumes, "open", revoked_meanwhile)
    await asyncio.sleep(0)
    resumed = await door.resume(CALLER, Wish("any"), asyncio.get_running_loop().time())
    assert resumed.call.error is not None
    assert resumed.call.error.reason is Reason.INVALID_API_KEY
    door.close(call, CALLER)
    assert not door._served
    watching.cancel()
    assert not producer.sent  # whose stream it is, another's, goes on


async def test_a_full_door_refuses_and_is_free_again(door: FrontDoor) -> None:
    calls = [await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time()) for _ in range(2)]
    with pytest.raises(HeadraceError) as caught:
        await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    assert caught.value.reason is Reason.OVERLOADED
    for call in calls:
        door.close(call, CALLER)
    call = await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    door.close(call, CALLER)
    await door.stop()
    assert len(door.dispatcher) == 0


async def test_a_door_that_closes_lets_nobody_in(door: FrontDoor) -> None:
    door.draining = True
    with pytest.raises(HeadraceError) as caught:
        await door.open(CALLER, requests(), {}, asyncio.get_running_loop().time())
    assert caught.value.reason is Reason.UNAVAILABLE


async def test_a_grant_is_used_again_while_it_lasts(door: FrontDoor) -> None:
    first = door.auth.grant(CALLER)
    assert door.auth.grant(CALLER) is first
    grant = read(SECRET, first)
    assert (grant.tenant, grant.key_id, grant.tiers, grant.reply) == ("t", "k", ("interactive",), Reply("tokens", 1))
    assert 5_000 < grant.expires_ms - time.time() * 1000 <= 10_000


async def test_callers_share_no_grant(door: FrontDoor) -> None:
    other = Caller("other", "k", ("interactive",))
    assert read(SECRET, door.auth.grant(other)).tenant == "other"
    assert read(SECRET, door.auth.grant(CALLER)).tenant == "t"


async def test_a_key_that_is_not_known_yet_is_looked_for_before_it_is_refused(
    door: FrontDoor, tenants: FakeTenants
) -> None:
    key, looks = "hr-new", []

    async def caught_up() -> bool:
        looks.append(True)
        kept = ApiKey("k2", hashlib.sha256(key.encode()).hexdigest(), CALLER.tiers, 1)
        tenants._on_event(TenantChanged("new", "salt", (kept,), 1), SimpleNamespace(timestamp=10))
        return True

    tenants.caught_up = caught_up  # type: ignore[method-assign]
    assert (await door.auth.from_key(key)).tenant == "new"
    assert (await door.auth.from_key(key)).tenant == "new"
    assert len(looks) == 1
    for other in ("hr-other", "x" * 1_000):
        with pytest.raises(HeadraceError, match="the API key is not known"):
            await door.auth.from_key(other)
    assert len(looks) == 2


async def test_whether_a_key_is_known_can_not_be_told_while_the_log_is_away(door: FrontDoor) -> None:
    with pytest.raises(HeadraceError, match="the log can't be read") as caught:  # the directory was never started
        await door.auth.from_key("hr-any")
    assert caught.value.reason is Reason.UNAVAILABLE


def test_an_expired_grant_is_minted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    auth = Authenticator(TenantDirectory.__new__(TenantDirectory), SECRET, Reply("tokens", 0), 10_000)
    now = [1_000.0]
    monkeypatch.setattr("bridge.auth.time.time", lambda: now[0])
    first = auth.grant(CALLER)
    now[0] += 4.9
    assert auth.grant(CALLER) == first
    now[0] += 0.2
    assert auth.grant(CALLER) != first
