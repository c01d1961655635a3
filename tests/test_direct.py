"""What docs/direct.py does with an object store, on a real S3 server: what it stores Headrace reads, and the other way round."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from infra.objects_s3 import S3Store
from infra.payloads import Payloads
from schemas.codec import Codec, encode_json, to_json
from schemas.events import Attempt, InferenceRequested, PayloadStored, TokensGenerated
from tests.s3 import BUCKET, S3Server

ROOT = Path(__file__).parents[1]
RID = "0193b5c0-0000-7000-8000-000000000001"


@pytest.fixture
def direct(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_OBJECTS", f"s3://{BUCKET}/direct/")
    monkeypatch.setenv("HEADRACE_OBJECTS_ENDPOINT", s3.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    spec = importlib.util.spec_from_file_location("direct", ROOT / "docs/direct.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_both_read_what_the_other_stored(direct: ModuleType, s3: S3Server) -> None:
    payloads = Payloads(S3Store(BUCKET, "direct", s3.endpoint))
    request = {"type": "InferenceRequested", "request_id": RID, "model": "m", "prompt": "x" * 1_000_000}
    written = direct.stored(request, json.dumps(request).encode(), "acme")
    reference = Codec().decode(json.dumps(written).encode())
    assert isinstance(reference, PayloadStored)
    assert await payloads.get(reference, Codec()) == InferenceRequested(RID, "m", prompt="x" * 1_000_000)
    chunk = TokensGenerated(RID, 0, Attempt(1, 2), 0, (1,), "y" * 1_000_000)
    told = await payloads.put(chunk, None, "acme", "json")
    assert direct.fetched(json.loads(encode_json(told))) == json.loads(json.dumps(to_json(chunk)))
    await payloads.store.put(f"payloads/acme/{told.digest}", b"{}")
    with pytest.raises(ValueError, match="try again"):
        direct.fetched(json.loads(encode_json(told)))
    await payloads.close()
