"""Ids of events: they hold a place whole, and nobody makes one up."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.event_ids import ID_CHARS_MAX, EventIds, Mark, Shape
from schemas.errors import HeadraceError
from schemas.events import Attempt, Reply, Usage
from schemas.reasons import Reason

SECRET = b"0123456789abcdef0123456789abcdef"
IDS = EventIds(SECRET)
ID = "01890a5d-ac96-774b-bcce-b302099a8057"
counts = st.integers(0, 2**40)
attempts = st.builds(Attempt, st.integers(0, 2**31), st.integers(0, 2**62))
replies = st.builds(
    Reply, st.sampled_from(["tokens", "tokens.acme"]), st.integers(0, 9999), st.sampled_from(["avro", "json"])
)
shapes = st.builds(Shape, st.booleans(), st.booleans(), st.text(max_size=100))


@st.composite
def marks(draw: st.DrawFn) -> Mark:
    n = draw(st.integers(0, 5))
    per_choice = st.lists(counts, min_size=n, max_size=n).map(tuple)
    return Mark(
        request_id=ID,
        reply=draw(replies),
        offset=draw(counts),
        shape=draw(shapes),
        version=draw(st.text(max_size=20)),
        attempt=draw(st.none() | attempts),
        started=draw(st.booleans()),
        released=draw(st.booleans()),
        accepted=draw(per_choice),
        chars=draw(per_choice),
        text_offsets=draw(st.just(()) | per_choice),
        usage=draw(st.none() | st.builds(Usage, counts, counts, counts)),
        answered=draw(st.booleans()),
    )


@given(marks())
def test_a_place_is_read_as_it_was_written(mark: Mark) -> None:
    text = IDS.write(mark, "acme")
    assert EventIds(SECRET).read(text, "acme") == mark
    assert re.fullmatch(r"[0-9a-zA-Z.:_%~-]+", text)
    assert text.split(":")[:3] == [ID, str(mark.reply.partition), str(mark.offset)]


MARK = Mark(ID, Reply("tokens", 3), 17, Shape(False, True, "m"), "1", Attempt(2, 9), True, (4, 5), (6, 7))
GOOD = IDS.write(MARK, "acme")


def reason(text: str, tenant: str = "acme", ids: EventIds = IDS) -> Reason:
    with pytest.raises(HeadraceError) as caught:
        ids.read(text, tenant)
    assert caught.value.param == "last_event_id"
    return caught.value.reason


def test_an_id_is_its_tenants_and_its_deployments_alone() -> None:
    assert IDS.read(GOOD, "acme") == MARK
    assert reason(GOOD, "other") is Reason.NOT_FOUND
    assert reason(GOOD, ids=EventIds(b"another secret of thirty-two byte")) is Reason.NOT_FOUND


@given(st.integers(0, len(GOOD) - 1), st.characters(min_codepoint=0, max_codepoint=0x2FF))
def test_no_id_with_any_other_character_is_good(place: int, character: str) -> None:
    forged = GOOD[:place] + character + GOOD[place + 1 :]
    if forged != GOOD:
        assert reason(forged) in (Reason.NOT_FOUND, Reason.INVALID_REQUEST)


@given(st.text(max_size=200))
def test_junk_is_no_id(text: str) -> None:
    assert reason(text) in (Reason.NOT_FOUND, Reason.INVALID_REQUEST)


def test_an_id_without_end_is_not_even_looked_at() -> None:
    assert reason(f"{ID}:0:0:{'A' * ID_CHARS_MAX}:x") is Reason.INVALID_REQUEST


def test_an_id_is_of_bounded_size() -> None:
    n, most = 128, 2**20
    mark = Mark(ID, Reply("tokens", 9), 2**40, Shape(True, True, "m" * 100), "v" * 63, Attempt(9, 2**60), True)
    full = Mark(
        **{**{name: getattr(mark, name) for name in Mark.__slots__}, "accepted": (most,) * n, "chars": (most,) * n}
    )
    assert len(IDS.write(full, "acme")) < ID_CHARS_MAX
