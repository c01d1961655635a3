"""KServe's own client, over REST and gRPC, against the front door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.bridge.conftest import KEY, RunningBridge
from tests.bridge.reporting import ready_workers
from tests.bridge.tensors import SUM

CALLS = Path(__file__).with_name("kserve_calls.py")


def test_kserves_client_is_served(bridge: RunningBridge) -> None:
    address = f"127.0.0.1:{bridge.settings.grpc_port}"
    argv = [sys.executable, str(CALLS), bridge.url, address, KEY]
    with ready_workers(bridge, SUM):
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert "model_name is not the one in the path" in found.pop("error")
    assert found == dict.fromkeys(found, True)
    assert len(found) == 5 + 3 * 7
