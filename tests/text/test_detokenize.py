"""The text fold: what may be shown after each token, and how an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.errors import HeadraceError
from schemas.events import Sampling, Usage
from schemas.parts import STOP_CHARS_MAX, STOPS_MAX
from schemas.reasons import Reason
from tests.text.tokenizers_made import PieceTokenizer
from text.detokenize import Finish, TextFold, TextState, usage
from text.tokenizer import ByteTokenizer

EOS = b"</s>"


def fold_of(pieces: Sequence[bytes | str], **rules: object) -> TextFold:
    """A fold whose token i is `pieces[i]`."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    special = frozenset(i for i, piece in enumerate(raw) if piece == EOS)
    tokenizer = PieceTokenizer(raw, eos_token_ids=special, special=special)
    return TextFold(tokenizer, **{"max_tokens": 10_000, **rules})  # type: ignore[arg-type]


def released(fold: TextFold, ids: Sequence[int]) -> list[str]:
    """The text that each token releases, and last the tail."""
    state, texts = fold.start(), []
    for token_id in ids:
        state, text, _ = fold.step(state, token_id)
        texts.append(text)
    return [*texts, fold.tail(state)]


def pieces_in_order(pieces: Sequence[bytes | str], **rules: object) -> tuple[list[str], Finish | None]:
    """What is released by `pieces`, each one token, and how that ends."""
    fold = fold_of(pieces, **rules)
    return released(fold, range(len(pieces))), fold.fold_all(range(len(pieces))).finish


class TestStopStrings:
    def test_a_stop_string_spread_over_tokens_never_leaks(self) -> None:
        texts, finish = pieces_in_order(["abc", "DEF", "G", "HI", "J", "klm"], stops=["DEFGHIJ"])
        assert texts == ["abc", "", "", "", "", "", ""]
        assert finish == Finish("stop", "DEFGHIJ")

    def test_a_near_miss_arrives_whole(self) -> None:
        texts, finish = pieces_in_order(["Hi.", "\nUs", "er", ";", " go"], stops=["\nUser:"])
        assert texts == ["Hi.", "", "", "\nUser;", " go", ""]
        assert finish is None

    @pytest.mark.parametrize("ending", [{"max_tokens": 2}, {}])
    def test_a_beginning_held_at_the_end_arrives(self, ending: dict[str, int]) -> None:
        texts, finish = pieces_in_order(["Hi.", "\nUser", EOS], stops=["\nUser:"], **ending)
        assert "".join(texts) == "Hi.\nUser"
        assert finish == Finish("length" if ending else "stop")

    def test_the_match_that_ends_first_wins_wherever_it_is_listed(self) -> None:
        assert pieces_in_order(["abcdef"], stops=["cdef", "de"]) == (["abc", ""], Finish("stop", "de"))

    def test_of_matches_that_end_together_the_first_listed_wins(self) -> None:
        assert pieces_in_order(["xabc"], stops=["c", "abc"]) == (["xab", ""], Finish("stop", "c"))
        assert pieces_in_order(["xabc"], stops=["abc", "c"]) == (["x", ""], Finish("stop", "abc"))
        assert pieces_in_order(["xabc"], stops=["abc", "c", "abc"]) == (["x", ""], Finish("stop", "abc"))

    def test_text_after_the_match_in_the_same_token_is_dropped(self) -> None:
        assert pieces_in_order(["ab|cd"], stops=["|"]) == (["ab", ""], Finish("stop", "|"))
        assert pieces_in_order([b"ab|\xf0\x9f"], stops=["|"]) == (["ab", ""], Finish("stop", "|"))

    def test_a_match_may_follow_a_failed_beginning_of_itself(self) -> None:
        texts, finish = pieces_in_order(["a", "a", "b", "a", "a", "a", "b"], stops=["aaab"])
        assert ("".join(texts), finish) == ("aab", Finish("stop", "aaab"))

    def test_the_stop_string_may_be_included(self) -> None:
        texts, finish = pieces_in_order(["abD", "EF", "gh"], stops=["DE"], include_stop_str=True)
        assert ("".join(texts), finish) == ("abDE", Finish("stop", "DE"))

    def test_a_stop_string_of_one_character_split_over_tokens(self) -> None:
        smile = "🙂".encode()
        assert pieces_in_order([b"a" + smile[:2], smile[2:] + b"b"], stops=["🙂"])[0] == ["a", "", ""]

    def test_the_last_token_allowed_may_still_stop(self) -> None:
        assert pieces_in_order(["a", "STOP"], stops=["STOP"], max_tokens=2)[1] == Finish("stop", "STOP")

    def test_stops_within_the_first_min_tokens_are_text(self) -> None:
        texts, finish = pieces_in_order(["a|", "b|", "c", "d|e"], stops=["|"], min_tokens=2)
        assert (texts, finish) == (["a|", "b|", "c", "d", ""], Finish("stop", "|"))

    def test_a_stop_begun_within_min_tokens_may_end_after_them(self) -> None:
        texts, finish = pieces_in_order(["aS", "TO", "P"], stops=["STOP"], min_tokens=2)
        assert ("".join(texts), finish) == ("a", Finish("stop", "STOP"))

    @pytest.mark.parametrize(
        ("stops", "param"),
        [
            ([""], "sampling.stop[0]"),
            (["a"] * (STOPS_MAX + 1), "sampling.stop"),
            (["a", "b" * (STOP_CHARS_MAX + 1)], "sampling.stop[1]"),
            (["\ud800"], "sampling.stop[0]"),
        ],
    )
    def test_unreasonable_stops_are_refused(self, stops: list[str], param: str) -> None:
        with pytest.raises(HeadraceError) as caught:
            fold_of([], stops=stops)
        assert (caught.value.reason, caught.value.param) == (Reason.INVALID_REQUEST, param)


class TestEndings:
    def test_eos_ends_without_its_text(self) -> None:
        assert pieces_in_order(["a", EOS, "b"], skip_special_tokens=False) == (["a", "", "", ""], Finish("stop"))

    def test_ignored_eos_goes_on(self) -> None:
        assert pieces_in_order(["a", EOS, "b"], ignore_eos=True) == (["a", "", "b", ""], None)
        assert pieces_in_order(["a", EOS], ignore_eos=True, skip_special_tokens=False)[0] == ["a", "</s>", ""]

    def test_ignored_eos_may_still_be_a_stop_token(self) -> None:
        assert pieces_in_order(["a", EOS], ignore_eos=True, stop_token_ids=frozenset({1}))[1] == Finish("stop", "1")

    def test_a_stop_token_ends_without_its_text(self) -> None:
        assert pieces_in_order(["a", "b"], stop_token_ids=frozenset({1})) == (["a", "", ""], Finish("stop", "1"))

    def test_a_stop_token_s_text_may_be_included(self) -> None:
        texts, finish = pieces_in_order(["a", "b"], stop_token_ids=frozenset({1}), include_stop_str=True)
        assert (texts, finish) == (["a", "b", ""], Finish("stop", "1"))

    def test_eos_comes_before_stop_token_and_length(self) -> None:
        rules = {"stop_token_ids": frozenset({1}), "max_tokens": 2}
        assert pieces_in_order(["a", EOS], **rules)[1] == Finish("stop")
        assert pieces_in_order(["a", "b"], **rules)[1] == Finish("stop", "1")

    def test_max_tokens_ends_with_the_last_token_s_text(self) -> None:
        assert pieces_in_order(["a", "b", "c"], max_tokens=2) == (["a", "b", "", ""], Finish("length"))

    def test_eos_does_not_end_before_min_tokens(self) -> None:
        assert pieces_in_order([EOS, "a", EOS, "b"], min_tokens=2) == (["", "a", "", "", ""], Finish("stop"))

    def test_tokens_after_the_end_change_nothing(self) -> None:
        fold = fold_of(["a", EOS])
        ended = fold.fold_all([0, 1])
        assert fold.fold(ended.state, [0, 0]) == (ended.state, "", Finish("stop"))
        assert fold.fold_all([0, 1, 0, 0]).state.made == 2

    @pytest.mark.parametrize(
        ("rules", "param"), [({"max_tokens": 0}, "max_tokens"), ({"min_tokens": -1}, "min_tokens")]
    )
    def test_senseless_counts_are_refused(self, rules: dict[str, int], param: str) -> None:
        with pytest.raises(HeadraceError) as caught:
            fold_of([], **rules)
        assert caught.value.param == f"sampling.{param}"

    def test_rules_come_from_sampling(self) -> None:
        sampling = Sampling(max_tokens=9, min_tokens=1, stop=("x",), stop_token_ids=(7,), ignore_eos=True)
        fold = TextFold.of(ByteTokenizer(), sampling)
        assert fold.fold_all(b"xabxc") == (
            TextState(made=4, begun=True, finish=Finish("stop", "x")),
            "xab",
            Finish("stop", "x"),
        )
        with pytest.raises(HeadraceError):
            TextFold.of(ByteTokenizer(), Sampling())


class TestCharacters:
    def test_a_character_waits_until_it_is_whole(self) -> None:
        smile = "🙂".encode()
        assert pieces_in_order([b"a" + smile[:1], smile[1:3], smile[3:] + b"b"])[0] == ["a", "", "🙂b", ""]

    def test_a_broken_character_is_replaced_once_it_is_known_to_be_broken(self) -> None:
        assert pieces_in_order([b"\xf0\x9f", b"a", b"\xff"])[0] == ["", "\ufffda", "\ufffd", ""]

    def test_an_unfinished_character_at_the_end_is_replaced(self) -> None:
        assert pieces_in_order([b"a\xf0\x9f", EOS])[0] == ["a", "\ufffd", ""]
        assert pieces_in_order([b"a\xf0\x9f"])[0] == ["a", "\ufffd"]

    def test_a_skipped_special_token_does_not_part_a_character(self) -> None:
        smile = "🙂".encode()
        assert pieces_in_order([smile[:2], EOS, smile[2:]], ignore_eos=True)[0] == ["", "", "🙂", ""]

    def test_one_leading_space_is_stripped_where_the_tokenizer_says_so(self) -> None:
        fold = TextFold(PieceTokenizer([b"", b"  a", b" b"], strips_leading_space=True), max_tokens=9)
        assert released(fold, [0, 1, 2]) == ["", " a", " b", ""]


def naive(fold: TextFold, ids: Sequence[int]) -> tuple[str, Finish | None]:
    """The fold's specification for the whole answer at once: decode everything after each token, and look for stops."""
    tokenizer, shown, floor = fold.tokenizer, b"", 0
    for made, token_id in enumerate(ids, start=1):
        finish = None
        if made >= fold.min_tokens and token_id in tokenizer.eos_token_ids and not fold.ignore_eos:
            return shown.decode("utf-8", "replace"), Finish("stop")
        if made >= fold.min_tokens and token_id in fold.stop_token_ids:
            return shown.decode("utf-8", "replace"), Finish("stop", str(token_id))
        if made >= fold.max_tokens:
            finish = Finish("length")
        if not (fold.skip_special_tokens and tokenizer.is_special(token_id)):
            shown += tokenizer.token_bytes(token_id)
        text = settled(shown)
        if made <= fold.min_tokens:
            floor = len(text)
        ends = [
            (end, place)
            for place, stop in enumerate(fold.stops)
            for end in range(floor + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, place = min(ends)
            return text[: end - len(fold.stops[place])], Finish("stop", fold.stops[place])
        if finish is not None:
            return shown.decode("utf-8", "replace"), finish
    return shown.decode("utf-8", "replace"), None


def settled(data: bytes) -> str:
    """`data` as text, but for a character at its end that may still become whole."""
    rests = (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80")  # one of them ends any beginning
    for cut in range(min(3, len(data)), 0, -1):
        if any(is_character(data[-cut:] + rest) for rest in rests):
            return data[:-cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def is_character(data: bytes) -> bool:
    """Whether `data` is one character in UTF-8."""
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


# Few letters, so that stop strings match, nearly match and overlap often.
letters = st.sampled_from(["a", "b", "ab", "é", "🙂", "\n"])
pieces_of_bytes = st.one_of(
    letters.map(str.encode),
    st.binary(max_size=3),
    st.sampled_from([b"\xf0", b"\x9f\x99", b"\x82", b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xff", b"", EOS]),
)
stop_strings = st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), max_size=3)


@st.composite
def folds(draw: st.DrawFn) -> tuple[TextFold, list[int]]:
    """Any rules over any tokens."""
    pieces = draw(st.lists(pieces_of_bytes, max_size=14))
    max_tokens = draw(st.integers(1, 16))
    fold = fold_of(
        pieces,
        stops=draw(stop_strings),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        stop_token_ids=draw(st.frozensets(st.integers(0, 13), max_size=1)),
    )
    return fold, list(range(len(pieces)))


class TestProperties:
    @settings(max_examples=500)
    @given(folds())
    def test_the_pieces_make_the_answer_that_the_whole_makes(self, case: tuple[TextFold, list[int]]) -> None:
        fold, ids = case
        assert ("".join(released(fold, ids)), fold.fold_all(ids).finish) == naive(fold, ids)

    @given(folds(), st.data())
    def test_chunks_change_nothing(self, case: tuple[TextFold, list[int]], data: st.DataObject) -> None:
        fold, ids = case
        alone = list(accumulate(released(fold, ids)))
        state, text, at = fold.start(), "", 0
        while at < len(ids):
            size = data.draw(st.integers(1, len(ids) - at))
            state, new, _ = fold.fold(state, ids[at : at + size])
            text, at = text + new, at + size
            assert text == alone[at - 1]
        assert text + fold.tail(state) == (alone[-1] if alone else "")

    @given(folds())
    def test_taking_up_at_any_token_equals_the_undisturbed_run(self, case: tuple[TextFold, list[int]]) -> None:
        fold, ids = case
        undisturbed = released(fold, ids)
        for cut in range(len(ids) + 1):
            state, before, _ = fold.fold_all(ids[:cut])
            _, after, finish = fold.fold(state, ids[cut:])
            assert before == "".join(undisturbed[:cut])
            assert after == "".join(undisturbed[cut:-1])
            assert finish == fold.fold_all(ids).finish

    @given(st.text(), st.data())
    @example("🙂é\n", None)
    def test_text_split_anywhere_arrives_without_a_replacement(self, text: str, data: st.DataObject | None) -> None:
        raw = text.encode("utf-8", "replace")
        cuts = sorted(data.draw(st.sets(st.integers(0, len(raw))))) if data else range(len(raw))
        pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        for shown in accumulate(pieces_in_order(pieces)[0]):
            assert raw.decode().startswith(shown)
        assert "".join(pieces_in_order(pieces)[0]) == raw.decode()

    @given(folds())
    def test_the_state_stays_small(self, case: tuple[TextFold, list[int]]) -> None:
        fold, ids = case
        longest = max(map(len, fold.stops), default=1)
        state = fold.start()
        for token_id in ids:
            state = fold.step(state, token_id).state
            assert len(state.pending) <= 3
            assert len(fold.tail(state)) <= longest - 1 + bool(state.pending)


def test_usage_counts_the_prompt_once() -> None:
    assert usage(7, [3, 4], cached_tokens=2) == Usage(prompt_tokens=7, completion_tokens=7, cached_tokens=2)
