"""Faults that people hit at other front doors, through the real one, real admission and a real worker: both endpoints, streamed and not."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from schemas.topics import REQUEST_MAX_BYTES
from tests.system.asking import BOTH, CHAT, COMPLETIONS, STREAMED, Answer, assert_served, body_of, call
from tests.system.audit import Audit, Mark
from tests.system.fixtures_models import WIDE
from tests.system.running import MODEL, RunningStack, script

pytestmark = pytest.mark.timeout(180)
CONTEXT = 4096


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "asked"),
    [
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [""]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"prompt": ["good", ""]}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}),
        (CHAT, {"messages": [{"role": "user", "content": []}]}),
        (CHAT, {"messages": [{"role": "user", "content": None}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": ""}]}),
    ],
)
@STREAMED
def test_an_empty_prompt_is_refused_or_answered(
    stack: RunningStack, endpoint: str, asked: dict[str, Any], stream: bool
) -> None:
    answer = call(stack, endpoint, {"model": MODEL, "stream": stream, "max_tokens": 4, **asked})
    assert answer.status in (200, 400)
    assert (answer.error is None) == (answer.status == 200)
    assert_served(stack)


def test_a_worker_that_starts_after_empty_prompts_serves(stack: RunningStack) -> None:
    call(stack, COMPLETIONS, {"model": MODEL, "prompt": [""]})
    call(stack, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": ""}]})
    stack.restart("worker")
    assert_served(stack)


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("logit_bias.99999999", {"logit_bias": {"99999999": 5}}),
        ("logit_bias.-1", {"logit_bias": {"-1": 5}}),
        ("logit_bias.257", {"logit_bias": {"257": 5}}),
        ("stop_token_ids[0]", {"stop_token_ids": [2147483647]}),
        ("stop_token_ids[1]", {"stop_token_ids": [7, -1]}),
        ("prompt[0]", {"prompt": [-3]}),
        ("prompt[2]", {"prompt": [1, 2, 257]}),
        ("prompt[0]", {"prompt": [[5], [99999999]]}),
    ],
)
def test_an_id_out_of_range_is_named_and_its_neighbour_is_unharmed(
    stack: RunningStack, param: str, options: dict[str, Any]
) -> None:
    neighbour = body_of(CHAT, script(tokens=["a", "b"], repeat=10, token_ms=20), temperature=0)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(call, stack, CHAT, neighbour)
        for stream in (True, False):
            refused = call(stack, COMPLETIONS, body_of(COMPLETIONS, "x", stream=stream) | options)
            assert (refused.status, refused.error and refused.error["param"]) == (400, param)
            if "prompt" not in options:
                refused = call(stack, CHAT, body_of(CHAT, "x", stream=stream) | options)
                assert (refused.status, refused.error and refused.error["param"]) == (400, param)
        assert beside.result().texts == {0: "ab" * 10}


@pytest.mark.parametrize("place", ["content", "user", "part", "stop", "model"])
def test_an_unpaired_surrogate_is_refused_before_the_log(stack: RunningStack, place: str) -> None:
    mark = Mark(stack, "requests.")
    escapes = (r"\ud800", r"\udfff", r"x\ud83dx", r"\udc00\ud800")
    for endpoint, escape in itertools.product([CHAT] if place == "part" else [CHAT, COMPLETIONS], escapes):
        content: Any = "SURROGATE" if place == "content" else "x"
        body = body_of(endpoint, [{"type": "text", "text": "SURROGATE"}] if place == "part" else content)
        if place in ("user", "stop", "model"):
            body[place] = "SURROGATE"
        refused = call(stack, endpoint, json.dumps(body).replace("SURROGATE", escape).encode())
        assert (refused.status, refused.error and refused.error["type"]) == (400, "invalid_request_error")
    assert mark.records() == []
    assert call(stack, CHAT, rb'{"model":"scripted","messages":[{"role":"user","content":"\ud83d\ude00"}]}').texts == {
        0: "\U0001f600"
    }


@BOTH
@STREAMED
def test_the_context_ends_where_it_ends(stack: RunningStack, endpoint: str, stream: bool) -> None:
    def ask(chars: int, **options: Any) -> Answer:
        return call(stack, endpoint, body_of(endpoint, "x" * chars, stream=stream, **options))

    whole = call(stack, endpoint, body_of(endpoint, "x" * 100))
    around = whole.usages[0]["prompt_tokens"] - 100  # the template's own tokens
    longest = CONTEXT - around - 1
    fits = ask(longest, max_tokens=1)
    assert (fits.status, fits.texts, fits.ends) == (200, {0: "x"}, {0: "length"})
    for refused in (ask(longest, max_tokens=2), ask(longest + 1), ask(longest + 1, max_tokens=1), ask(CONTEXT + 500)):
        assert refused.status == 400
        assert refused.content_type.startswith("application/json")
        assert refused.error is not None
        assert refused.error["code"] == "context_length_exceeded"
    assert_served(stack)


@BOTH
def test_a_body_is_taken_up_to_its_limit(stack: RunningStack, endpoint: str) -> None:
    def sized(body_bytes: int, *, padded: bool) -> Answer:
        spare = body_bytes - len(json.dumps(body_of(endpoint, "")))
        content = "xxxxx" if padded else "x" * spare
        return call(stack, endpoint, json.dumps(body_of(endpoint, content)).encode().ljust(body_bytes))

    for size in (12 * 1024 * 1024, REQUEST_MAX_BYTES + 1):
        for padded in (True, False):
            refused = sized(size, padded=padded)
            assert (refused.status, refused.error and refused.error["code"]) == (413, "payload_too_large")
    for size in (REQUEST_MAX_BYTES, REQUEST_MAX_BYTES - 1):
        refused = sized(size, padded=False)
        assert (refused.status, refused.error and refused.error["code"]) == (400, "context_length_exceeded")
        assert sized(size, padded=True).texts == {0: "xxxxx"}


# --- what is answered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "end"),
    [
        (["abc ", "DEF", "G", "HI", "J", "more"], "DEFGHIJ", "abc ", "stop"),
        (["\nUs", "er", ";"], "\nUser:", "\nUser;", "stop"),
        (["\nUs", "er", ": no"], "\nUser:", "", "stop"),
        (["one", "\nUs", "er", "\nUser", ":x"], ["\nUser:", "never"], "one\nUser", "stop"),
        (["aa", "a", "ab", "c"], "aab", "aa", "stop"),
        (["x", "END", "y"], ["NDy", "END"], "x", "stop"),
        (["caf", "é", "s"], "és", "caf", "stop"),
        (["end of it: DEF"], "DEFG", "end of it: DEF", "stop"),
    ],
)
@BOTH
def test_no_byte_of_a_stop_string_leaks(
    stack: RunningStack, endpoint: str, tokens: list[str], stop: str | list[str], text: str, end: str
) -> None:
    for directions in (script(tokens=tokens), script(hex=[f"{byte:02x}" for byte in "".join(tokens).encode()])):
        for stream in (True, False):
            answer = call(stack, endpoint, body_of(endpoint, directions, stop=stop, stream=stream))
            assert (answer.texts, answer.ends) == ({0: text}, {0: end}), (directions, stream)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": None}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
@BOTH
def test_usage_comes_once_and_last_and_only_when_asked_for(
    stack: RunningStack, endpoint: str, n: int, options: dict[str, Any], told: bool
) -> None:
    whole = call(stack, endpoint, body_of(endpoint, "wörd", n=n))
    answer = call(stack, endpoint, body_of(endpoint, "wörd", n=n, stream=True, **options))
    assert answer.texts == whole.texts == dict.fromkeys(range(n), "wörd")
    assert answer.finished
    assert answer.usages == (whole.usages if told else [])
    assert [chunk["choices"] == [] for chunk in answer.chunks] == [False] * (len(answer.chunks) - told) + [True] * told
    assert whole.usages[0]["completion_tokens"] == n * (len("wörd".encode()) + 1)  # and the end
    assert whole.usages[0]["total_tokens"] == whole.usages[0]["prompt_tokens"] + whole.usages[0]["completion_tokens"]


@pytest.mark.parametrize("text", ["\U0001f600", "né", "日本語", "\U0001f468‍\U0001f469‍\U0001f467", "e\u0301"])
@BOTH
@STREAMED
def test_characters_split_over_tokens_arrive_whole(stack: RunningStack, endpoint: str, text: str, stream: bool) -> None:
    directions = script(hex=[f"{byte:02x}" for byte in text.encode()], repeat=3, token_ms=1)
    answer = call(stack, endpoint, body_of(endpoint, directions, stream=stream))
    assert answer.texts == {0: text * 3}  # and no chunk holds U+FFFD


@BOTH
@STREAMED
def test_an_engines_error_is_a_status_if_nothing_was_sent(stack: RunningStack, endpoint: str, stream: bool) -> None:
    answer = call(stack, endpoint, body_of(endpoint, script(**{"raise": "error"}), stream=stream))
    assert (answer.status, answer.content_type.split(";")[0]) == (500, "application/json")
    assert answer.error is not None
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert (answer.error["code"], answer.error["type"]) == ("engine_error", "server_error")
    assert_served(stack)


@BOTH
def test_an_engines_error_after_tokens_breaks_the_stream_off(stack: RunningStack, endpoint: str) -> None:
    # The answer has begun long before the error, or its status would tell of it.
    directions = script(tokens=["begun", ", broken"], token_ms=1_000, **{"raise": "error"})
    answer = call(stack, endpoint, body_of(endpoint, directions, stream=True))
    assert answer.status == 200
    assert answer.texts == {0: "begun, broken"}
    assert answer.error is not None
    assert answer.error["code"] == "engine_error"
    assert not answer.finished
    assert call(stack, endpoint, body_of(endpoint, directions)).status == 500


@STREAMED
def test_an_answer_larger_than_a_record_arrives_whole_or_fails_quickly(
    stack: RunningStack, wide: str, stream: bool
) -> None:
    audit = Audit(stack)
    directions = script(tokens=["x" * 100_000], repeat=25)
    answer = call(stack, COMPLETIONS, body_of(COMPLETIONS, directions, WIDE, stream=stream))
    if answer.error is None:
        assert answer.texts == {0: "x" * 2_500_000}
    else:
        assert answer.error["code"] in ("answer_too_large", "slow_reader")
    audit.settled(scripted=False)
    assert_served(stack, WIDE)
