"""What is held back: in the order of the log, one of each tenant in turn, and nothing is kept of what is gone."""

from __future__ import annotations

from dataclasses import replace

from decisions.accounts import Accounts
from schemas.events import InferenceRequested, ModelVersionRegistered, Position
from schemas.topics import INTERACTIVE
from streams.held import Held, HeldBack
from tests.decisions.worlds import FakeGrant, case

PLACE, SIZE = ("m", "v1"), 100
VERSION = ModelVersionRegistered("m", "v1", "scripted", "", 100)


def held(offset: int, tenant: str = "acme") -> Held:
    source = Position("requests.interactive", offset % 2, offset)
    found = replace(case(grant=FakeGrant(tenant)), version=VERSION, source=source)
    return Held(replace(found, request=InferenceRequested(f"r{offset}", "m")), Accounts(INTERACTIVE), SIZE)


async def test_lanes_are_in_the_order_of_the_log_and_take_turns() -> None:
    back, each = HeldBack(INTERACTIVE), [held(3), held(1), held(2), held(4, "beta")]
    for one in each:
        back.add(one)
    order = []
    while back.places():
        for tenant in list(back.tenants(PLACE)):
            if (first := back.first(PLACE, tenant)) is not None:
                order.append(first.case.request.request_id)
                back.go_on(first)
                assert first.turn.result()
    assert order == ["r1", "r4", "r2", "r3"]
    assert len(back) == len(each), "until they are removed"
    for one in each:
        back.remove(one)
    assert (len(back), back.bytes, back.of_partition(0), back.bytes_of(1)) == (0, 0, 0, 0)


async def test_who_waits_no_longer_isnt_found_and_has_no_turn() -> None:
    back, gone, stays = HeldBack(INTERACTIVE), held(1), held(2)
    back.add(gone)
    back.add(stays)
    assert (back.count(PLACE, "acme"), back.bytes, back.of_partition(1), list(back.waiting())) == (2, 200, 1, ["acme"])
    assert back.find("acme", "r1") is gone
    gone.end(goes_on=False)
    gone.end(goes_on=True)
    assert (back.find("acme", "r1"), back.find("beta", "r2"), gone.turn.result()) == (None, None, False)
    assert back.first(PLACE, "acme") is stays
    back.remove(stays)
    back.remove(gone)
    assert (back.places(), back.all(), back.first(PLACE, "acme")) == ([], [], None)
