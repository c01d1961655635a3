"""Who gets a stream, by which id, and what is refused by name."""

from __future__ import annotations

from tests.bridge.conftest import OTHER, RunningBridge
from tests.bridge.resuming import ids, resume
from tests.bridge.test_openai_chat import body, stream_events


async def test_nobody_gets_a_stream_by_a_foreign_or_forged_or_broken_id(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    response, events = await stream_events(bridge, body())
    _, strangers = await stream_events(bridge, body())
    request_id = response.headers["x-request-id"]
    good = ids(events)[0]
    strange = ids(strangers)[0]
    assert (await resume(other, request_id, good))[0].status_code == 200
    parts = good.split(":")
    forged = [
        ":".join([*parts[:2], str(int(parts[2]) + 1), *parts[3:]]),
        ":".join([parts[0], str(int(parts[1]) ^ 1), *parts[2:]]),
        ":".join([strange.split(":")[0], *parts[1:]]),
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        ":".join([*parts[:3], "AAAA", parts[4]]),
    ]
    for event_id in forged:
        refused, _ = await resume(other, request_id, event_id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    for event_id in ("x", "a:b:c:d:e", ":", f"{request_id}:1", "é:::: ".strip(), "x" * 9000):
        refused, _ = await resume(other, request_id, None, last_event_id=event_id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    mixed, _ = await resume(other, request_id, strange)
    assert (mixed.status_code, mixed.json()["error"]["param"]) == (400, "last_event_id")
    foreign, _ = await resume(other, request_id, good, key=OTHER)
    unknown, _ = await resume(other, request_id, forged[0], key=OTHER)
    assert foreign.status_code == 404
    assert foreign.json() == unknown.json()


async def test_nobody_gets_a_foreign_or_unknown_stream_from_its_beginning(
    bridge: RunningBridge, other: RunningBridge
) -> None:
    response, _ = await stream_events(bridge, body())
    request_id = response.headers["x-request-id"]
    foreign, _ = await resume(other, request_id, key=OTHER)
    unknown, _ = await resume(other, "01890a5d-ac96-774b-bcce-b302099a8057")
    nonsense, _ = await resume(other, "zork")
    for refused in (foreign, unknown, nonsense):
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert refused.json() == unknown.json()
    assert (await resume(other, request_id, key="hr-nobody"))[0].status_code == 401


async def test_what_is_not_understood_is_refused_by_name(bridge: RunningBridge) -> None:
    response, _ = await stream_events(bridge, body())
    request_id = response.headers["x-request-id"]
    for name, value in (("format", "xml"), ("include_usage", "perhaps"), ("zork", "1")):
        refused, _ = await resume(bridge, request_id, None, None, None, **{name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    header = "X-Headrace-On-Disconnect"
    async with bridge.client() as client:
        for call in (
            client.post("/v1/chat/completions", json=body(), headers={header: "perhaps"}),
            client.get(f"/v1/streams/{request_id}", headers={header: "perhaps"}),
        ):
            refused = await call
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, header)
