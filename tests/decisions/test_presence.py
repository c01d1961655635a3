"""Who is gone, and who makes way for whom: given what doors have told, when a request of the same tenant comes."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from decisions.ledger import Cost, Hold
from decisions.ledger_rows import Open
from decisions.presence import FORGOTTEN_MS, GAP_MS, SILENT_MS, Presence, Yielding, yielding
from schemas.events import FrontDoorSeen, Reply
from schemas.topics import MINUTE_MS, TOKENS
from tests.decisions.worlds import NOW

BEAT_MS = 200
R, S, T = "r", "s", "t"


def told(
    *beats: tuple[int, str], presence: Presence | None = None, adopted: Mapping[str, str] | None = None
) -> Presence:
    """Presence after these: at so many ms, by this door; `adopted` names a stream that a door has, from its first word on."""
    found = presence or Presence()
    for at, door in beats:
        streams = tuple(name for name, by in (adopted or {}).items() if by == door)
        found.heard(FrontDoorSeen(door, streams), NOW + at)
    return found


def beating(door: str, first: int, last: int) -> list[tuple[int, str]]:
    """As often as a door speaks, both ends included."""
    return [(at, door) for at in range(first, last + 1, BEAT_MS)]


def merged(*beats: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return sorted(each for some in beats for each in some)


def held(door: str = "a", charged: int = 0, scopes: tuple[str, ...] = ("",), running: int = 1) -> Open:
    return Open(Hold(NOW + charged, Cost(5, running=running), scopes), NOW + 60_000, Reply(TOKENS, 1), door=door)


# --- who is gone -------------------------------------------------------------------------------------------------------


def test_a_door_that_was_never_heard_is_not_gone() -> None:
    presence = told(*beating("b", 0, 60_000))
    assert not presence.orphaned("a", R)
    assert presence.watched_ms("a", R) is None


def test_a_door_is_gone_when_others_were_heard_for_longer_than_the_silence() -> None:
    presence = told(*merged(beating("a", 0, 2_000), beating("b", 100, 2_100)))
    told(*beating("b", 2_300, 2_900), presence=presence)
    assert not presence.orphaned("a", R)
    told((2_000 + SILENT_MS, "b"), presence=presence)
    assert not presence.orphaned("a", R)
    told((2_001 + SILENT_MS, "b"), presence=presence)
    assert presence.orphaned("a", R)
    assert not presence.orphaned("b", R)


def test_who_comes_back_from_a_long_pause_is_there_again() -> None:
    presence = told((0, "a"), *beating("b", 100, 20_500))
    assert presence.orphaned("a", R)
    told((20_600, "a"), presence=presence)
    assert not presence.orphaned("a", R)


def test_when_all_were_silent_the_log_was_away_and_nobody_is_gone() -> None:
    presence = told(*merged(beating("a", 0, 2_000), beating("b", 100, 2_100)))
    told(*beating("b", 60_000, 60_000 + SILENT_MS), presence=presence)
    assert not presence.orphaned("a", R)
    told((60_001 + SILENT_MS, "b"), presence=presence)
    assert presence.orphaned("a", R)


def test_a_pause_that_tells_nothing_begins_anew_each_time() -> None:
    beats = [(at, "b") for at in range(0, 60_000, GAP_MS + 1)]
    assert not told((0, "a"), *beats).orphaned("a", R)


def test_a_stream_that_another_door_has_adopted_is_watched_as_long_as_that_is_heard() -> None:
    presence = told(*merged([(0, "a")], beating("b", 100, 60_500)), adopted={R: "b"})
    assert presence.orphaned("a", S)
    assert not presence.orphaned("a", R)
    told(*beating("b", 60_700, 61_500), presence=presence)  # its caller has left again
    assert not presence.orphaned("a", R)
    told((61_700, "b"), presence=presence)
    assert presence.orphaned("a", R)


def test_time_that_steps_back_makes_nobody_gone() -> None:
    presence = told(*merged(beating("a", 0, 2_000), beating("b", 100, 2_100)))
    told(*beating("b", -60_000, -55_000), presence=presence)
    assert presence.now_ms == NOW + 2_100
    assert not presence.orphaned("a", R)


def test_what_nobody_can_ask_for_any_more_is_forgotten() -> None:
    presence = told((0, "a"), adopted={R: "a"})
    told((MINUTE_MS + 1, "b"), presence=presence)
    assert (presence._adopted, set(presence._heard)) == ({}, {"a", "b"})
    told((FORGOTTEN_MS + 1, "b"), presence=presence)
    assert set(presence._heard) == {"b"}


LIVES = st.lists(st.tuples(st.integers(50, 450), st.booleans()), min_size=1, max_size=60)
"""From one word to the next, and whose it is: true is the one that lives, which speaks at least every `SILENT_MS`."""


@given(LIVES, st.integers(0, 59), st.integers(0, 600_000))
def test_whoever_speaks_in_time_is_never_gone_wherever_a_reader_stands_and_however_long_the_log_was_away(
    lives: list[tuple[int, bool]], away_at: int, away_ms: int
) -> None:
    presence, at, last = told((0, "a")), 0, 0
    for number, (gap, lives_on) in enumerate(lives):
        at += gap
        if number == away_at and away_ms > GAP_MS:
            at, last = at + away_ms, at + away_ms  # nobody could write meanwhile
        if lives_on or at - last > SILENT_MS - 450:
            last = at
            told((at, "a"), presence=presence)
        else:
            told((at, "b"), presence=presence)
        assert not presence.orphaned("a", R)


@given(st.lists(st.integers(1, GAP_MS), min_size=1, max_size=40))
def test_whoever_speaks_no_more_is_gone_once_others_spoke_for_long_enough(gaps: list[int]) -> None:
    presence, at = told((0, "a")), 0
    for gap in gaps:
        at += gap
        told((at, "b"), presence=presence)
        assert presence.orphaned("a", R) == (at > SILENT_MS)


# --- who makes way -----------------------------------------------------------------------------------------------------


GONE = 10_000
"""At this time `a` is gone, `b` and `c` are there."""
ONE = {"": 1}


def later() -> Presence:
    return told(*merged([(0, "a")], beating("b", 0, GONE), beating("c", 0, GONE)))


def test_the_oldest_of_a_gone_door_makes_way() -> None:
    opened = {R: held(charged=5), S: held(charged=3), T: held("b", charged=1)}
    assert yielding(opened, ONE, later(), NOW + GONE, "b") == Yielding((S,))
    assert yielding(opened, ONE, later(), NOW + GONE, "b", {S}) == Yielding((R,))
    assert yielding(opened, {"": 2}, later(), NOW + GONE, "b") == Yielding((S, R))


def test_nobody_makes_way_in_vain() -> None:
    opened = {R: held(), T: held("b")}
    assert yielding(opened, {"": 2}, later(), NOW + GONE, "b") == Yielding()
    assert yielding(opened, {"": 1, "key k1": 1}, later(), NOW + GONE, "b") == Yielding()
    assert yielding({R: held(scopes=("", "key k1"))}, {"": 1, "key k1": 1}, later(), NOW + GONE, "b") == Yielding((R,))


def test_of_several_limits_as_few_as_can_be_make_way() -> None:
    opened = {R: held(charged=1), S: held(charged=2, scopes=("", "key k1")), T: held(charged=0)}
    assert yielding(opened, {"": 1, "key k1": 1}, later(), NOW + GONE) == Yielding((S,))
    assert yielding(opened, {"": 2, "key k1": 1}, later(), NOW + GONE) == Yielding((S, T))


def test_what_nobody_has_to_watch_keeps_its_slot() -> None:
    opened = {R: held(""), S: held("unheard"), T: held(running=0)}
    assert yielding(opened, ONE, later(), NOW + GONE) == Yielding()


def test_who_was_heard_since_the_request_came_is_there_and_who_was_not_may_be_gone() -> None:
    opened = {R: held("b")}
    assert yielding(opened, ONE, later(), NOW + GONE, "c") == Yielding()
    assert yielding(opened, ONE, later(), NOW + GONE + 1, "c") == Yielding(unsure=True)
    assert yielding(opened, ONE, later(), NOW + GONE + 1, "b") == Yielding()  # its own door has just asked


def test_nobody_makes_way_before_doors_are_read_up_to_the_request() -> None:
    assert yielding({R: held()}, ONE, later(), NOW + GONE + 1, "b") == Yielding(unsure=True)


@given(
    st.dictionaries(
        st.text("rstuvw", min_size=1, max_size=2),
        st.builds(
            held,
            st.sampled_from(["a", "b", "", "unheard"]),
            st.integers(0, 9),
            st.sampled_from([("",), ("", "k"), ("", "m"), ("", "k", "m")]),
            st.integers(0, 1),
        ),
        max_size=8,
    ),
    st.dictionaries(st.sampled_from(["", "k", "m"]), st.integers(1, 3), min_size=1),
)
def test_those_who_make_way_are_gone_and_make_all_the_room_that_is_needed(
    opened: dict[str, Open], needed: dict[str, int]
) -> None:
    found = yielding(opened, needed, later(), NOW + GONE, "b")
    gone = {name for name, one in opened.items() if one.door == "a" and one.hold.cost.running}
    assert set(found.orphans) <= gone

    def freed(names: set[str], scope: str) -> int:
        return sum(scope in opened[name].hold.scopes for name in names)

    assert bool(found.orphans) == all(freed(gone, scope) >= count for scope, count in needed.items())
    if found.orphans:
        assert all(freed(set(found.orphans), scope) >= count for scope, count in needed.items())
        assert len(found.orphans) <= sum(needed.values())
