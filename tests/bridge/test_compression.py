"""Bodies that travel compressed, both ways: by Triton's client and by hand."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from bridge import compression
from bridge.compression import accepted, coding_of, decompressed
from schemas.errors import HeadraceError
from schemas.reasons import Reason
from schemas.topics import REQUEST_MAX_BYTES
from tests.bridge.conftest import KEY, MODEL, RunningBridge
from tests.bridge.tensors import identity

MIB = 1 << 20
CHAT = "/v1/chat/completions"
VALUES = np.arange(40_000, dtype=np.float32).reshape(2, -1) % 100


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(data) + made.flush()


WAYS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
]


@pytest.mark.parametrize(("coding", "compress"), WAYS)
@pytest.mark.parametrize("size", [0, 1, MIB])
def test_a_body_comes_back_up_to_the_limit_and_not_beyond(
    coding: str, compress: Callable[[bytes], bytes], size: int
) -> None:
    data = bytes(index % 251 for index in range(size))
    assert decompressed(compress(data), coding, size) == data
    if size:
        with pytest.raises(HeadraceError, match=r"more than .* once it is decompressed") as refused:
            decompressed(compress(data), coding, size - 1)
        assert refused.value.reason is Reason.PAYLOAD_TOO_LARGE


def test_of_what_would_fill_the_memory_no_more_than_the_limit_is_held() -> None:
    made = zlib.compressobj(9)
    bomb = b"".join(made.compress(bytes(MIB)) for _ in range(256)) + made.flush()
    assert len(bomb) < MIB // 2
    tracemalloc.start()
    try:
        with pytest.raises(HeadraceError) as refused:
            decompressed(bomb, "deflate", MIB)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert refused.value.reason is Reason.PAYLOAD_TOO_LARGE


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda _raw: b"{}", "isn't|breaks off"),
        (lambda _raw: b"", "breaks off"),
        (lambda raw: raw[:-1], "breaks off"),
        (lambda raw: raw + b"more", "something follows"),
        (lambda raw: raw + raw, "something follows"),
        (lambda raw: raw[:12] + bytes([raw[12] ^ 0xFF]) + raw[13:], "isn't"),
    ],
)
def test_what_is_not_whole_is_refused_in_words(coding: str, spoil: Callable[[bytes], bytes], told: str) -> None:
    text = b"a body that is long enough to be spoilt"
    good = gzip.compress(text) if coding == "gzip" else zlib.compress(text)
    with pytest.raises(HeadraceError, match=told) as refused:
        decompressed(spoil(good), coding, MIB)
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_ways_by_their_names() -> None:
    given = {"": None, "identity": None, "gzip": "gzip", " GZIP ": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
    assert {name: coding_of(name) for name in given} == given
    for other in ("br", "zstd", "gzip, gzip", "*"):
        with pytest.raises(HeadraceError, match="isn't taken; gzip and deflate are"):
            coding_of(other)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", None),
        ("identity", None),
        ("br, zstd", None),
        ("*", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br", "gzip"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("gzip;q=0, deflate;q=0.1", "deflate"),
        ("gzip; q=0", None),
        ("GZIP;Q=0.3", "gzip"),
        ("gzip;q=much", None),
    ],
)
def test_what_a_caller_takes(header: str, found: str | None) -> None:
    assert accepted(header) == found


# --- through the front door ---------------------------------------------------------------------------------------------


def auth() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("asked", ["gzip", "deflate", None])
@pytest.mark.parametrize("answered", ["gzip", "deflate", None])
@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_compresses_its_requests_and_takes_answers_so(
    bridge: RunningBridge, asked: str | None, answered: str | None, binary: bool
) -> None:
    x = triton_http.InferInput("x", list(VALUES.shape), "FP32")
    x.set_data_from_numpy(VALUES, binary_data=binary)
    y = triton_http.InferRequestedOutput("y", binary_data=binary)
    with triton_http.InferenceServerClient(bridge.url.removeprefix("http://"), network_timeout=30) as client:
        found = client.infer(
            identity("FP32"),
            [x],
            outputs=[y],
            headers=auth(),
            request_compression_algorithm=asked,
            response_compression_algorithm=answered,
        )
    np.testing.assert_array_equal(found.as_numpy("y"), VALUES)


def test_and_over_grpc(bridge: RunningBridge) -> None:
    x = triton_grpc.InferInput("x", list(VALUES.shape), "FP32")
    x.set_data_from_numpy(VALUES)
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{bridge.settings.grpc_port}") as client:
        for way in ("gzip", "deflate"):
            found = client.infer(identity("FP32"), [x], headers=auth(), compression_algorithm=way)
            np.testing.assert_array_equal(found.as_numpy("y"), VALUES)


def chat(text: str, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **more}).encode()


async def plainly(bridge: RunningBridge, path: str, body: bytes, **headers: str) -> tuple[httpx.Headers, bytes]:
    """An answer as it is on the wire."""
    async with (
        bridge.client() as client,
        client.stream("POST", path, content=body, headers=headers) as answer,
    ):
        assert answer.status_code == httpx.codes.OK
        return answer.headers, b"".join([part async for part in answer.aiter_raw()])


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose answer is large, where that begins at less."""
    monkeypatch.setattr(compression, "ANSWER_BYTES_MIN", 2_000)
    return "mill " * 600


async def test_a_chat_is_taken_compressed_and_a_large_answer_given_so(bridge: RunningBridge, text: str) -> None:
    asked = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    headers, body = await plainly(bridge, CHAT, gzip.compress(chat(text)), **asked)
    assert (headers["content-encoding"], headers["vary"]) == ("gzip", "Accept-Encoding")
    assert int(headers["content-length"]) == len(body) < 2_000
    assert json.loads(gzip.decompress(body))["choices"][0]["message"]["content"] == text
    headers, body = await plainly(bridge, CHAT, chat(text), **{"Accept-Encoding": "identity"})
    assert ("content-encoding" in headers, headers["vary"]) == (False, "Accept-Encoding")
    assert json.loads(body)["choices"][0]["message"]["content"] == text


async def test_an_inference_is_answered_compressed(bridge: RunningBridge) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": list(VALUES.shape), "data": VALUES.ravel().tolist()}
    asked = {"Accept-Encoding": "deflate"}
    headers, body = await plainly(
        bridge, f"/v2/models/{identity('FP32')}/infer", json.dumps({"inputs": [x]}).encode(), **asked
    )
    assert (headers["content-encoding"], headers["content-length"]) == ("deflate", str(len(body)))
    assert json.loads(zlib.decompress(body))["outputs"][0]["data"] == x["data"]


async def test_a_small_answer_a_stream_and_a_refusal_are_never_compressed(bridge: RunningBridge, text: str) -> None:
    headers, body = await plainly(bridge, CHAT, chat("hi"), **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in headers
    assert json.loads(body)["object"] == "chat.completion"
    headers, body = await plainly(bridge, CHAT, chat(text, stream=True), **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in headers
    assert body.endswith(b"data: [DONE]\n\n")
    async with bridge.client() as client:
        refused = await client.post(CHAT, content=chat(text, **{text: 1}), headers={"Accept-Encoding": "gzip"})
    assert (refused.status_code, "content-encoding" in refused.headers) == (400, False)


@pytest.mark.parametrize("path", [CHAT, f"/v2/models/{identity('FP32')}/infer"])
async def test_a_bomb_and_what_is_compressed_otherwise_are_refused(bridge: RunningBridge, path: str) -> None:
    bomb = gzip.compress(bytes(REQUEST_MAX_BYTES + 1))
    before = len(bridge.responder.seen)
    async with bridge.client() as client:
        large = await client.post(path, content=bomb, headers={"Content-Encoding": "gzip"})
        other = await client.post(path, content=b"{}", headers={"Content-Encoding": "br"})
        broken = await client.post(path, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert [answer.status_code for answer in (large, other, broken)] == [413, 400, 400]
    assert "gzip and deflate are" in other.text
    assert len(bridge.responder.seen) == before
