"""The codec: round trips of every event, resolution of older and newer writers, and clear errors for junk."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from typing import Any, cast

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.avro_code import (
    _HIGH,
    _LONGS,
    LONGS_KEPT,
    MISFITS,
    SENTENCE_BYTES_MAX,
    TIMES_KEPT,
    VARINTS_KEPT,
    WORD_CHARS_MAX,
    WORDS_KEPT,
    _KnownForms,
    _Sentences,
    _Words,
    long_form,
    reading,
    writing,
)
from schemas.avro_form import reader
from schemas.codec import (
    _TYPES,
    HEADER_BYTES,
    MARKER,
    Codec,
    Growing,
    decode_json,
    encode,
    encode_json,
    fingerprint,
    own_schemas,
    published,
)
from schemas.errors import HeadraceError, InvalidField, Undecodable, UnknownSchema
from schemas.events import (
    EVENT_TYPES,
    Attempt,
    Decision,
    Event,
    InferenceRejected,
    InferenceRequested,
    LedgerSaved,
    Message,
    SchemaPublished,
    TokensGenerated,
)
from schemas.parts import SavedHold

st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 63) - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(str, st.text(st.characters(codec="utf-8"), max_size=20))
EVENTS = st.one_of([st.from_type(cls) for cls in EVENT_TYPES])
CODEC = Codec()


@given(EVENTS)
def test_every_event_survives_avro(event: Event) -> None:
    assert CODEC.decode(encode(event)) == event


@given(EVENTS)
def test_every_event_survives_json(event: Event) -> None:
    assert decode_json(encode_json(event)) == event


@given(EVENTS.filter(lambda event: not isinstance(event, SchemaPublished)), st.data())
def test_a_cut_record_is_undecodable(event: Event, data: st.DataObject) -> None:
    whole = encode(event)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(Undecodable):
        CODEC.decode(cut)


@given(st.binary(max_size=200))
def test_junk_raises_nothing_but_undecodable(junk: bytes) -> None:
    for value in (junk, b"{" + junk, MARKER + junk, encode(InferenceRequested("id", "m"))[:HEADER_BYTES] + junk):
        try:
            CODEC.decode(value)
        except Undecodable:
            pass


@given(EVENTS.filter(lambda event: not isinstance(event, SchemaPublished)))
def test_the_code_made_for_a_class_writes_what_fastavro_writes_and_reads_it(event: Event) -> None:
    made = _TYPES[type(event)]
    value = made.write(event)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, made.parsed, made.to_dict(event), disable_tuple_notation=True)
    assert value == made.header + out.getvalue()
    assert made.read(value, HEADER_BYTES) == event


@given(EVENTS.filter(lambda event: not isinstance(event, SchemaPublished)), st.data())
def test_what_the_made_code_reads_of_any_bytes_is_what_fastavro_reads(event: Event, data: st.DataObject) -> None:
    made, value = _TYPES[type(event)], bytearray(encode(event))
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(HEADER_BYTES, len(value) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = made.read(bytes(value), HEADER_BYTES)
    except MISFITS:
        return
    plain = fastavro.schemaless_reader(io.BytesIO(value[HEADER_BYTES:]), made.parsed, None)
    assert repr(found) == repr(reader(made.cls)(cast(dict[str, Any], plain)))  # of not-a-numbers, too


@pytest.mark.parametrize("number", [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 1 << 62, (1 << 63) - 1, -(1 << 63)])
def test_integers_of_every_length_are_made_and_read(number: int) -> None:
    event = TokensGenerated("id", number, Attempt(number, number), number, (number, 5, number), "")
    made = _TYPES[TokensGenerated]
    assert made.read(made.write(event), HEADER_BYTES) == event


def test_of_the_forms_of_large_integers_only_so_many_are_kept() -> None:
    for number in range(2 * VARINTS_KEPT):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, "long", number << 40)
        assert long_form(number << 40) == out.getvalue()
        assert long_form(number << 40) == out.getvalue(), "as it is remembered, too"
    assert len(_LONGS._high) <= VARINTS_KEPT
    assert len(_LONGS._times) <= TIMES_KEPT
    assert sum(value >= LONGS_KEPT for value in _LONGS) <= TIMES_KEPT


def test_of_short_strings_only_so_many_are_kept_and_of_long_ones_none() -> None:
    words = _Words()
    for number in range(2 * WORDS_KEPT):
        assert words[f"é{number}"] == long_form(len(f"é{number}".encode())) + f"é{number}".encode()
    assert len(words) <= WORDS_KEPT
    for text in ("é" * WORD_CHARS_MAX, "é" * (WORD_CHARS_MAX + 1), ""):
        event = InferenceRequested(text, text)
        assert CODEC.decode(encode(event)) == event


def test_of_records_of_short_strings_only_so_many_are_kept_and_of_long_ones_none() -> None:
    sentences = _Sentences()
    for number in range(2 * WORDS_KEPT):
        words = f"é{number}", "", "x"
        assert sentences[words] == b"".join(long_form(len(word.encode())) + word.encode() for word in words)
    assert len(sentences) <= WORDS_KEPT
    kept = len(sentences)
    assert len(sentences["é" * SENTENCE_BYTES_MAX, "x"]) > SENTENCE_BYTES_MAX
    assert len(sentences) == kept


def test_of_records_of_short_strings_only_so_many_are_known_when_they_are_read_and_of_long_ones_none() -> None:
    known, write = _KnownForms(reading(Decision)), writing(Decision, b"")
    for number in range(2 * WORDS_KEPT):
        decision = Decision(f"é{number}", "", "x")
        assert known[write(decision)] == known[write(decision)] == decision
    assert len(known) <= WORDS_KEPT
    kept = len(known)
    long = Decision("é" * SENTENCE_BYTES_MAX, "x")
    assert known[write(long)] == long
    assert len(known) == kept


DECISIONS = [
    Decision("a" * length, "é" * other, "z" * rest)
    for length in (0, 1, 63, 64)
    for other in (0, 31, 32)
    for rest in (0, 63, 64)
]


@given(st.lists(st.sampled_from(DECISIONS), max_size=8), st.data())
def test_decisions_that_recur_are_read_as_they_were_written_and_cut_ones_never(
    decisions: list[Decision], data: st.DataObject
) -> None:
    event = InferenceRejected("id", "t", "m", "interactive", "x", "y", decisions=tuple(decisions))
    value = encode(event)
    assert CODEC.decode(value) == CODEC.decode(value) == event
    cut = data.draw(st.integers(0, len(value) - 1))
    with pytest.raises(Undecodable):
        CODEC.decode(value[:cut])


@given(
    st.lists(
        st.integers(1_700_000_000_000, 1_700_000_020_000) | st.integers(-(1 << 42), 1 << 42), min_size=2, max_size=8
    )
)
def test_times_of_one_moment_are_told_apart(times: list[int]) -> None:
    made = _TYPES[TokensGenerated]
    for time_ms in [*times, *times]:
        event = TokensGenerated("id", time_ms, Attempt(time_ms, -time_ms), time_ms, (time_ms,), "")
        assert made.read(made.write(event), HEADER_BYTES) == event


def test_of_the_high_bits_of_times_only_so_many_are_known() -> None:
    made = _TYPES[TokensGenerated]
    for number in range(2 * WORDS_KEPT):
        event = TokensGenerated("id", (1 << 36) + (number << 14), Attempt(1, 1), 1, (), "")
        assert made.read(made.write(event), HEADER_BYTES) == event
    assert len(_HIGH) <= WORDS_KEPT


def test_a_value_that_the_made_code_cannot_write_goes_the_generic_way() -> None:
    with pytest.raises(MISFITS):
        _TYPES[InferenceRequested].write(InferenceRequested("id", cast(str, 5)))
    with pytest.raises(HeadraceError, match="model must be a string"):
        encode(InferenceRequested("id", cast(str, 5)))


@given(st.from_type(LedgerSaved), st.integers(1, 5))
def test_an_event_made_in_portions_is_the_event(row: LedgerSaved, size: int) -> None:
    growing = Growing(replace(row, open=()))
    for start in range(0, len(row.open), size):
        growing.add(row.open[start : start + size])
    assert growing.value() == encode(row)


def test_an_item_that_the_made_code_cannot_write_goes_the_generic_way_in_portions_too() -> None:
    holds = tuple(SavedHold(f"r{number}", number, 1, 1, 1, 9, ()) for number in range(3))
    row = LedgerSaved("acme", "interactive", 1, 2)
    growing = Growing(row)
    for portion in (holds[:1], [replace(holds[1], tokens=1 << 64)], holds[2:]):
        growing.add(portion)
    with pytest.raises(HeadraceError, match="open"):
        growing.value()
    growing = Growing(replace(row, counters=[]))  # type: ignore[arg-type]
    growing.add(holds)
    assert growing.value() == encode(replace(row, open=holds))


def test_arrays_in_blocks_with_a_size_are_read() -> None:
    """Avro lets a writer tell how many bytes a block of an array has; fastavro reads that."""
    made = _TYPES[TokensGenerated]
    value = encode(TokensGenerated("id", 0, Attempt(1, 1), 0, (7, 8), ""))
    sized = value.replace(b"\x04\x0e\x10\x00", b"\x03\x04\x0e\x10\x00")
    assert sized != value
    with pytest.raises(MISFITS):
        made.read(sized, HEADER_BYTES)
    assert CODEC.decode(sized) == CODEC.decode(value)


def test_single_object_encoding_is_avros() -> None:
    value = encode(InferenceRequested("id", "m", prompt="p"))
    schema = own_schemas()["InferenceRequested"]
    assert value[:2] == b"\xc3\x01"
    assert value[2:10].hex() == fingerprint(schema)
    assert fastavro.schemaless_reader(io.BytesIO(value[10:]), schema, None)["prompt"] == "p"  # type: ignore[index,call-overload]


def older_and_newer() -> tuple[SchemaPublished, bytes, SchemaPublished, bytes]:
    """What an older process (without `user`) and a newer one (with a field more) would write."""
    own = own_schemas()["InferenceRequested"]
    older, newer = copy.deepcopy(own), copy.deepcopy(own)
    older["fields"] = [f for f in older["fields"] if f["name"] != "user"]
    newer["fields"].append({"name": "colour", "type": ["null", "string"], "default": None})

    def record(schema: dict[str, Any], extra: dict[str, Any]) -> tuple[SchemaPublished, bytes]:
        out = io.BytesIO()
        out.write(MARKER + bytes.fromhex(fingerprint(schema)))
        body = io.BytesIO(encode(InferenceRequested("id", "m", prompt="p"))[10:])
        plain = {**cast(dict[str, Any], fastavro.schemaless_reader(body, own, None)), **extra}
        fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema), {}), plain)
        return SchemaPublished(fingerprint(schema), "InferenceRequested", json.dumps(schema)), out.getvalue()

    return *record(older, {}), *record(newer, {"colour": "red"})


def test_older_and_newer_writers_are_read_once_their_schema_is_known() -> None:
    old_schema, old, new_schema, new = older_and_newer()
    codec = Codec()
    for schema, value in ((old_schema, old), (new_schema, new)):
        with pytest.raises(UnknownSchema) as caught:
            codec.decode(value)
        assert caught.value.fingerprint == schema.fingerprint
        codec.learn(schema)
        assert codec.decode(value) == InferenceRequested("id", "m", prompt="p")


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"type":"record","name":"InferenceRequested","fields":[]}',
        '{"name": "Nobody"}',
    ],
)
def test_a_published_schema_that_is_none_is_refused(schema: str) -> None:
    with pytest.raises(Undecodable):
        Codec().learn(SchemaPublished("00", "InferenceRequested", schema))


def test_every_published_schema_can_be_learnt() -> None:
    for cls in EVENT_TYPES:
        Codec().learn(published(cls))


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"type":"Nothing"}', "type"),
        ('{"type":7}', "type"),
        ("{}", "type"),
        ('{"type":"InferenceRequested","model":"m"}', "request_id"),
        ('{"type":"InferenceRequested","request_id":"i","model":"m","colour":1}', "colour"),
        ('{"type":"InferenceRequested","request_id":"i","model":"m","messages":{}}', "messages"),
        (
            '{"type":"InferenceRequested","request_id":"i","model":"m","messages":[{"role":"user"}]}',
            "messages[0].content",
        ),
        ('{"type":"InferenceRequested","request_id":"i","model":"\\ud800"}', "model"),
        ('{"type":"InferenceRequested","request_id":"i","model":"m","timeout_ms":1e3}', "timeout_ms"),
        ('{"type":"InferenceRequested","request_id":"i","model":"m","timeout_ms":true}', "timeout_ms"),
        ('{"type":"InferenceRequested","request_id":"i","model":"m","timeout_ms":9223372036854775808}', "timeout_ms"),
        ('{"type":"InferenceRequested","request_id":"i","model":"m","stream":1}', "stream"),
        (
            '{"type":"InferenceRequested","request_id":"i","model":"m","sampling":{"temperature":"0"}}',
            "sampling.temperature",
        ),
        (
            '{"type":"InferenceRequested","request_id":"i","model":"m","sampling":{"logit_bias":{"1":null}}}',
            "sampling.logit_bias.1",
        ),
        (
            '{"type":"RecordDeadLettered","topic":"t","partition":0,"offset":0,"timestamp_ms":0,"key":"?","value":null,"headers":{},"reason":"","message":"","process":""}',
            "key",
        ),
    ],
)
def test_json_errors_name_the_field(text: str, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        decode_json(text.encode())
    assert caught.value.param == param
    assert param.split("[", maxsplit=1)[0] in caught.value.message


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000, "é🙂"])
@pytest.mark.parametrize("place", ["{%s: 1}", '{"sampling": {%s: 1}}', '{"sampling": {"logit_bias": {%s: null}}}'])
def test_a_name_that_a_writer_made_up_can_be_told_in_an_event(name: str, place: str) -> None:
    """Else nobody would hear of the fault: the refusal that names it couldn't be written."""
    request = {"type": "InferenceRequested", "request_id": "i", "model": "m"}
    record = {**request, **json.loads(place % json.dumps(name))}
    with pytest.raises(InvalidField) as caught:
        decode_json(json.dumps(record).encode())
    fault = caught.value
    assert len(fault.message) < 1_000
    encode(InferenceRejected("i", "t", "m", "interactive", fault.reason.value, fault.message, fault.param))


@pytest.mark.parametrize(
    "text", ["{", '{"a":NaN}', '{"type":"InferenceRequested"', "{" + '"a":{' * 100_000, '{"\\ud800": 1}']
)
def test_json_that_is_none_is_undecodable(text: str) -> None:
    with pytest.raises(Undecodable):
        decode_json(text.encode())


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (InferenceRequested("i", "m\ud800"), "model"),
        (InferenceRequested("i", "m", timeout_ms=1 << 63), "timeout_ms"),
        (InferenceRequested("i", "m", messages=(Message("user", "\udfff"),)), "messages[0].content"),
        (TokensGenerated("i", 0, Attempt(1, 1 << 70), 0, (), ""), "attempt.counter"),
    ],
)
def test_what_does_not_fit_is_named_before_it_is_written(event: Event, name: str) -> None:
    with pytest.raises(HeadraceError, match=name.replace("[", r"\[").replace("]", r"\]")):
        encode(event)


def test_an_optional_list_of_two_is_no_name_and_value() -> None:
    event = InferenceRequested("r", "m", prompt_token_ids=(104, 105))
    assert Codec().decode(encode(event)) == event
