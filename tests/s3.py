"""A real S3 server, SeaweedFS, as its package ships it: one process on ports of its own, with one bucket and one pair of credentials."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infra import ports

BUCKET = "headrace-tests"
ACCESS_KEY, SECRET_KEY = "headrace-tests-access", "headrace-tests-secret"
PROGRAM = Path(sys.executable).parent / "weed"
LAUNCH = Path(__file__).parents[1] / "infra/launch.py"
START_WAIT_S = 60.0
VOLUMES_MAX = 64
VOLUME_MB = 64


class S3Server:
    """Runs from `start` to `stop`; what it holds is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "weed.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = ports.free_port()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """How boto3 finds the credentials, and no others."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self) -> Any:
        """A plain client, for what tests do behind the store's back."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def start(self) -> None:
        data, config = self._folder / "data", self._folder / "s3.json"
        data.mkdir(exist_ok=True)
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Admin", "Read", "Write", "List"]
        config.write_text(
            json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]})
        )
        options = {
            "dir": str(data),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": str(config),
            "s3.port": str(self.port),
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "volume.max": str(VOLUMES_MAX),
            "master.volumeSizeLimitMB": str(VOLUME_MB),
            "master.telemetry": "false",
            "s3.iam": "false",
            "s3.autoCreateBucket": "false",
        }
        for name in ("master.port", "volume.port", "filer.port", "s3.port.grpc"):
            options[name] = str(ports.free_port())
        for name in ("master", "volume", "filer"):
            options[f"{name}.port.grpc"] = str(ports.free_port())
        launch = (sys.executable, str(LAUNCH), "exec", str(os.getpid()))  # it ends with these tests, however they end
        argv = [
            *launch,
            str(PROGRAM),
            "server",
            "-filer",
            "-s3",
            *(f"-{name}={value}" for name, value in options.items()),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=self._folder, stdout=log, stderr=log, start_new_session=True)
        self._await_ready()

    def _await_ready(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        client, end_s = self.client(), time.monotonic() + START_WAIT_S
        try:
            while True:
                try:
                    client.create_bucket(Bucket=BUCKET)
                    client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                    break
                except (BotoCoreError, ClientError):
                    running = self._process is not None and self._process.poll() is None
                    assert running, self._log.read_text()[-2000:]
                    assert time.monotonic() < end_s, self._log.read_text()[-2000:]
                    time.sleep(0.1)
        finally:
            client.close()

    def stop(self) -> None:
        """At once: what it holds is not needed again."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
