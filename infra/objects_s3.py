"""Objects in a bucket, by S3's API. Credentials come by boto3's own chain: environment, files, or the machine's role."""

from __future__ import annotations

from typing import Any

from infra.objects import THREADS, Listed, ObjectDamaged, ObjectMissing, ObjectStore, StoreAway
from schemas.errors import HeadraceError
from schemas.reasons import Reason

CONNECT_S = 3.0
READ_S = 10.0
"""How long a connection may be silent."""
TRIES = 2
"""Of one call, by botocore; whoever waits for the store goes on trying."""
PAGE_OBJECTS = 1_000
DEFAULT_REGION = "us-east-1"
"""For servers that know no regions, where none is configured."""
_MISSING = ("NoSuchKey", "404", "NotFound")


class S3Store(ObjectStore):
    """See the module. Keys go below `prefix` in the bucket, which must be there."""

    def __init__(self, bucket: str, prefix: str = "", endpoint: str | None = None) -> None:
        """`endpoint` is the address of a server that isn't AWS's. Raises HeadraceError (invalid_request) if it, or boto3, is missing."""
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/") + (f" at {endpoint}" if endpoint else ""))
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client(endpoint)

    def _put(self, key: str, body: bytes) -> None:
        self._call("put_object", Key=self._prefix + key, Body=body, ContentType="application/octet-stream")

    def _get(self, key: str, bytes_max: int) -> bytes:
        from botocore.exceptions import BotoCoreError

        try:
            found = self._call("get_object", Key=self._prefix + key)
        except _NotThere:
            raise ObjectMissing(key) from None
        body = found["Body"]
        try:
            content: bytes = body.read(bytes_max)
        except (BotoCoreError, OSError) as error:
            raise ObjectDamaged(f"{self.name} broke off in the middle of {key}: {type(error).__name__}") from error
        finally:
            body.close()
        return content

    def _delete(self, key: str) -> None:
        try:
            self._call("delete_object", Key=self._prefix + key)
        except _NotThere:
            return

    def _page(self, prefix: str, page: str) -> tuple[list[Listed], str | None]:
        more = {"ContinuationToken": page} if page else {}
        found = self._call("list_objects_v2", Prefix=self._prefix + prefix, MaxKeys=PAGE_OBJECTS, **more)
        listed = [
            Listed(item["Key"].removeprefix(self._prefix), item["Size"], int(item["LastModified"].timestamp() * 1000))
            for item in found.get("Contents", ())
        ]
        wanted = [item for item in listed if item.key == prefix or item.key.startswith(f"{prefix}/")]
        return wanted, found.get("NextContinuationToken")

    async def close(self) -> None:
        """Also its connections."""
        await super().close()
        self._client.close()

    def _call(self, operation: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in _MISSING:
                raise _NotThere from None
            raise StoreAway(f"{self.name} refuses {operation}: {code or type(error).__name__}") from error
        except (BotoCoreError, OSError) as error:
            raise StoreAway(f"{self.name} can't be reached: {type(error).__name__}") from error


class _NotThere(Exception):  # never leaves this module
    pass


def _client(endpoint: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise HeadraceError(
            Reason.INVALID_REQUEST, "HEADRACE_OBJECTS names a bucket, which needs boto3: install headrace[stores]"
        ) from None
    session = boto3.session.Session()
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        max_pool_connections=THREADS,
        retries={"total_max_attempts": TRIES, "mode": "standard"},
        # The server checks what it is sent by the signature's own SHA-256; what it gives is checked by `get`.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto", "payload_signing_enabled": True},
    )
    region = session.region_name or DEFAULT_REGION
    try:
        return session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
    except ValueError as error:
        raise HeadraceError(Reason.INVALID_REQUEST, f"HEADRACE_OBJECTS_ENDPOINT can't be used: {error}") from None
