"""Logs hold no secret, health answers say what is true, and a process ends with a true exit status."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jwt
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from infra import metrics, ports
from infra.objections import objecting
from infra.redact import MASK, redact_text, redact_value
from infra.telemetry import OpsServer, configure_logging

API_KEY = "hr-" + "k3yK3y_-" * 5
GRANT = jwt.encode({"tenant": "acme"}, "s" * 32, algorithm="HS256")


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Gives what loggers configured in the test have written to standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


# --- logs ---


def test_a_line_is_one_json_object_off_a_terminal(logged: Callable[[], str]) -> None:
    configure_logging("bridge")
    structlog.get_logger("bridge").info("listening", port=8080)
    logging.getLogger("some.library").warning("odd: %s", "thing", extra={"partition": 3})

    own, library = (json.loads(line) for line in logged().splitlines())

    assert own["event"] == "listening"
    assert own["port"] == 8080
    assert own["process"] == library["process"] == "bridge"
    assert own["level"] == "info"
    assert library["event"] == "odd: thing"
    assert library["partition"] == 3


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"grant": "x-secret"},
        {"authorization": "x-secret"},
        {"api_key": "x-secret"},
        {"apiKey": "x-secret"},
        {"kafka_password": b"x-secret"},
        {"grant_secret": b"x-secret"},
        {"token": "x-secret"},
        {"access_token": "x-secret"},
        {"headers": [("traceparent", b"00-1"), ("grant", b"x-secret")]},
        {"headers": {"Authorization": "x-secret"}},
        {"deep": {"a": [{"b": {"api-key": "x-secret"}}]}},
        {"note": f"called with {API_KEY}"},
        {"note": [f"{API_KEY}"]},
        {"note": f"grant {GRANT} refused"},
        {"note": GRANT.encode()},
        {"note": "Authorization: Bearer abcdef"},
        {"url": "redis://user:hunter2@host/0"},
        {"problem": ValueError(f"bad key {API_KEY}")},
    ],
)
def test_no_secret_reaches_a_log(logged: Callable[[], str], as_json: bool, fields: dict[str, Any]) -> None:
    configure_logging("bridge", json=as_json)
    structlog.get_logger("bridge").warning("refused", **fields)

    text = logged()
    assert "redacted" in text
    for secret in ("x-secret", API_KEY, GRANT, "abcdef", "hunter2"):
        assert secret not in text


def test_no_secret_reaches_a_log_by_a_traceback_or_a_library(logged: Callable[[], str]) -> None:
    configure_logging("bridge", json=True)
    try:
        raise RuntimeError(f"upstream said {GRANT}")
    except RuntimeError:
        structlog.get_logger("bridge").exception("crashed")
        logging.getLogger("library").exception("crashed with %s", API_KEY)

    text = logged()
    assert "RuntimeError" in text
    assert GRANT not in text
    assert API_KEY not in text


def test_what_only_looks_secret_by_name_is_kept() -> None:
    kept = {
        "tokens": [1, 2],
        "from_token": 3,
        "token_ids": [5],
        "max_tokens": 7,
        "secrets_dir": "x",
        "reply": "tokens.acme",
    }
    assert redact_value(kept) == kept


@pytest.mark.parametrize(
    "text", ["three-hr-window", "hr-1", "chr-aaaaaaaaaaaa", "eyJ", "http://host:80/path@x", "10:30"]
)
def test_ordinary_text_is_kept(text: str) -> None:
    assert redact_text(text) == text


@given(
    st.recursive(
        st.text() | st.binary() | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_redaction_takes_any_value_and_yields_what_json_can_hold(value: Any) -> None:
    json.dumps(redact_value({"value": value, "note": API_KEY}))


def test_values_nested_without_end_are_cut_off() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert MASK in json.dumps(redact_value(loop))


# --- health and metrics ---


async def _get(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")


async def test_readiness_follows_the_process() -> None:
    port = ports.free_port()
    objection: list[str | None] = ["catching up: 12 records behind"]
    async with OpsServer(port, ready=lambda: objection[0]):
        refused = await _get(port, "/readyz")
        objection[0] = None
        ready = await _get(port, "/readyz")

    assert (refused.status_code, refused.text) == (503, "catching up: 12 records behind\n")
    assert (ready.status_code, ready.text) == (200, "ok\n")


async def test_whoever_in_the_process_objects_is_heard() -> None:
    port = ports.free_port()
    async with OpsServer(port, ready=lambda: None):
        with objecting("b is missing"), objecting("a is missing"), objecting("a is missing"):
            refused = await _get(port, "/readyz")
        ready = await _get(port, "/readyz")

    assert (refused.status_code, refused.text) == (503, "a is missing; b is missing\n")
    assert ready.status_code == 200


async def test_a_check_that_raises_is_not_ready() -> None:
    def broken() -> str | None:
        raise RuntimeError(API_KEY)

    port = ports.free_port()
    async with OpsServer(port, ready=broken):
        answer = await _get(port, "/readyz")

    assert answer.status_code == 503
    assert "RuntimeError" in answer.text
    assert API_KEY not in answer.text


async def test_liveness_is_the_event_loops_heartbeat() -> None:
    port = ports.free_port()
    server = OpsServer(port, ready=lambda: None)
    async with server:
        alive = await _get(port, "/livez")
        server._beat_s -= 60
        hung = server.not_live()

    assert alive.status_code == 200
    assert hung is not None
    assert "heartbeat is 59." in hung


async def test_a_loop_that_hangs_answers_no_liveness_check() -> None:
    port = ports.free_port()
    async with OpsServer(port, ready=lambda: None):
        checks = [asyncio.create_task(asyncio.to_thread(_check, port)) for _ in range(2)]
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - the fault itself
        hung = await asyncio.gather(*checks)
        after = await asyncio.to_thread(_check, port)

    assert hung == ["timeout", "timeout"]
    assert after == "200"


def _check(port: int) -> str:
    try:
        return str(httpx.get(f"http://127.0.0.1:{port}/livez", timeout=0.3, trust_env=False).status_code)
    except httpx.TimeoutException:
        return "timeout"


async def test_liveness_hears_the_processs_own_objection() -> None:
    port = ports.free_port()
    async with OpsServer(port, ready=lambda: None, live=lambda: "the engine died"):
        answer = await _get(port, "/livez")
    assert (answer.status_code, answer.text) == (503, "the engine died\n")


def test_what_one_thread_times_is_told_as_any_histogram_is() -> None:
    told = []
    for kind in (Histogram, type(metrics.ADMISSION_SECONDS)):
        registry = CollectorRegistry()
        times = kind("headrace_test_seconds", "As a test.", ("check",), buckets=(0.1, 1.0), registry=registry)
        for value in (0.0, 0.1, 0.5, 1.0, 1.5, 7.0):
            times.labels("a").observe(value)
            generate_latest(registry)
        lines = generate_latest(registry).decode().splitlines()
        told.append([line for line in lines if "_created" not in line])
    assert told[0] == told[1]
    assert 'headrace_test_seconds_bucket{check="a",le="0.1"} 2.0' in told[1]


async def test_metrics_are_served_under_their_promised_names() -> None:
    metrics.TTFT_SECONDS.labels("m", "1", "interactive").observe(0.02)
    metrics.REQUESTS.labels("m", "1", "interactive", "completed").inc()
    metrics.DEAD_LETTERS.labels("requests.batch", "undecodable").inc()
    port = ports.free_port()
    async with OpsServer(port, ready=lambda: None):
        text = (await _get(port, "/metrics")).text

    assert 'headrace_ttft_seconds_bucket{le="0.02",model="m",tier="interactive",version="1"} 1.0' in text
    assert 'headrace_requests_total{model="m",outcome="completed",tier="interactive",version="1"}' in text
    assert 'headrace_dead_letters_total{reason="undecodable",topic="requests.batch"}' in text
    for name in (
        "itl_seconds",
        "queue_seconds",
        "model_seconds",
        "tokens_total",
        "slots",
        "slots_used",
        "records_total",
    ):
        assert f"# TYPE headrace_{name} " in text


def test_a_tenants_own_topic_is_no_label() -> None:
    assert metrics.topic_label("tokens.acme") == metrics.topic_label("tokens") == "tokens"
    assert metrics.topic_label("requests.batch") == "requests.batch"


async def test_a_port_in_use_names_its_holder() -> None:
    port = ports.free_port()
    async with OpsServer(port, ready=lambda: None):
        with pytest.raises(ports.PortInUse, match=rf"port {port} .*in use by .*pid \d+"):
            await OpsServer(port, ready=lambda: None).start()


async def test_a_server_can_be_stopped_twice_and_started_without_a_port() -> None:
    server = OpsServer(0, ready=lambda: None)
    await server.start()
    await server.stop()
    await server.stop()


# --- the frame of a process ---
