"""Trace context goes from a record to what it caused, and junk starts a new trace."""

from __future__ import annotations

import pytest

from infra.tracing import child, new_traceparent, trace_id

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()


def test_a_child_stays_in_the_trace_with_its_own_span():
    headers = child([("other", b"1"), ("traceparent", PARENT), ("tracestate", b"a=1")])
    assert trace_id(headers) == TRACE
    assert dict(headers)["tracestate"] == b"a=1"
    assert SPAN.encode() not in dict(headers)["traceparent"]
    assert {name for name, _ in headers} == {"traceparent", "tracestate"}


def test_flags_are_passed_on_and_a_long_state_is_not():
    headers = child([("traceparent", PARENT[:-2] + b"00"), ("tracestate", b"x" * 513)])
    assert dict(headers)["traceparent"].endswith(b"-00")
    assert "tracestate" not in dict(headers)


def test_a_later_version_is_read_as_far_as_it_is_known():
    assert trace_id([("traceparent", b"cc" + PARENT[2:] + b"-more")]) == TRACE


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xff",
        PARENT[:-1],
        PARENT.upper(),
        PARENT + b"-more",
        b"ff" + PARENT[2:],
        PARENT.replace(TRACE.encode(), b"0" * 32),
        PARENT.replace(SPAN.encode(), b"0" * 16),
        PARENT + b"\n",
    ],
)
def test_junk_starts_a_new_trace(junk: bytes):
    [(name, value)] = child([("traceparent", junk), ("tracestate", b"a=1")])
    assert name == "traceparent"
    assert trace_id([(name, value)]) not in (None, TRACE)


def test_new_traces_differ():
    assert new_traceparent() != new_traceparent()
    assert trace_id([]) is None
