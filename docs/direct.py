"""Use Headrace through the log alone: write a request, read the answer. Needs only aiokafka (and boto3 for what is too large for a record).

headrace tenants grant default --json > grant.json
python docs/direct.py grant.json smollm2 "What is the capital of France?" [idempotency key]

Asked again with the same key, or with the same request id, a question is answered by the first's stream, from its start.
Where the cluster is and how to sign in is told by the variables HEADRACE_KAFKA and HEADRACE_KAFKA_*, as to Headrace's own processes.
The question "-" is read from standard input. One that is too large for a record goes through the object store, HEADRACE_OBJECTS, which needs
boto3, and credentials that may read and write below payloads/<tenant>/ there.
"""

import asyncio
import hashlib
import json
import os
import secrets
import sys
import time
import uuid

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.helpers import create_ssl_context

CLOCKS_MS = 10_000  # how far two brokers' may be apart


def told(name: str, default: str | None = None) -> str | None:
    return os.environ.get("HEADRACE_KAFKA" + name) or default


def connection() -> dict:
    files = {"cafile": told("_CAFILE"), "certfile": told("_CERTFILE"), "keyfile": told("_KEYFILE")}
    security = "SASL_SSL" if told("_USERNAME") else "SSL" if any(files.values()) else "PLAINTEXT"
    security = told("_SECURITY", security).upper()
    return {
        "bootstrap_servers": told("", "127.0.0.1:9092").removeprefix("kafka://"),
        "security_protocol": security,
        "sasl_mechanism": told("_SASL_MECHANISM", "PLAIN").upper(),
        "sasl_plain_username": told("_USERNAME"),
        "sasl_plain_password": told("_PASSWORD"),
        "ssl_context": create_ssl_context(**files) if security.endswith("SSL") else None,
    }


INLINE_MAX_BYTES = 768 * 1024


def place(tenant: str, digest: str) -> tuple:
    """A client of the object store, and where a payload is in it."""
    import boto3

    store = os.environ.get("HEADRACE_OBJECTS", "")
    if not store.startswith("s3://"):
        raise SystemExit("what is too large for a record needs HEADRACE_OBJECTS=s3://bucket/prefix")
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    endpoint = os.environ.get("HEADRACE_OBJECTS_ENDPOINT") or None
    key = "/".join(part for part in (prefix.rstrip("/"), "payloads", tenant, digest) if part)
    return boto3.client("s3", endpoint_url=endpoint), {"Bucket": bucket, "Key": key}


def stored(request: dict, body: bytes, tenant: str) -> dict:
    """Puts a request into the object store; what is written to the log instead."""
    digest = hashlib.sha256(body).hexdigest()
    client, where = place(tenant, digest)
    client.put_object(**where, Body=body)
    told = {"request_id": request["request_id"], "tenant": tenant, "event": request["type"]}
    return {"type": "PayloadStored", **told, "digest": digest, "size_bytes": len(body)}


def fetched(event: dict) -> dict:
    """The part of an answer that a record refers to."""
    client, where = place(event["tenant"], event["digest"])
    body = client.get_object(**where)["Body"].read()
    if hashlib.sha256(body).hexdigest() != event["digest"]:
        raise ValueError("the object store gave something else than was put there; try again")
    return json.loads(body)


async def ask(grant: dict, model: str, question: str, key: str = "") -> None:
    made_ms = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    request_id = str(uuid.UUID(int=made_ms & ~(0xF << 76 | 0x3 << 62) | 7 << 76 | 2 << 62))  # a UUIDv7
    request = {"type": "InferenceRequested", "request_id": request_id, "model": model, "idempotency_key": key}
    request |= {"messages": [{"role": "user", "content": question}], "sampling": {"max_tokens": 32, "temperature": 0}}
    body = json.dumps(request).encode()
    if len(body) > INLINE_MAX_BYTES:
        body = json.dumps(stored(request, body, grant["tenant"])).encode()
    kafka = connection()
    async with AIOKafkaConsumer(**kafka) as consumer, AIOKafkaProducer(**kafka) as producer:
        answers = TopicPartition(grant["topic"], grant["partition"])
        consumer.assign([answers])
        await consumer.seek_to_end(answers)
        headers = [("grant", grant["grant"].encode())]
        await producer.send_and_wait("requests.batch", body, grant["tenant"].encode(), headers=headers)
        count, owner = 0, (0, 0)  # of the tokens so far, and who makes them: a former owner may still write
        async for record in consumer:
            event = json.loads(record.value)
            if event["request_id"] != request_id:
                continue
            if event["type"] == "PayloadStored":
                event = fetched(event)
            if event["type"] == "InferenceJoined":  # it was asked before: go back to where that one's stream begins
                request_id, first = event["first_request_id"], event["first_reply"]
                answers = TopicPartition(first["topic"], first["partition"])
                consumer.assign([answers])
                found = await consumer.offsets_for_times({answers: event["first_requested_ms"] - CLOCKS_MS})
                if found[answers] is None:
                    print(f"its tokens are no longer kept: take the answer at /v1/streams/{request_id}")
                    return
                consumer.seek(answers, found[answers].offset)
                continue
            attempt = tuple((event.get("attempt") or {}).values())
            if event["type"] == "GenerationTakenOver" or (event["type"] == "GenerationStarted" and owner == (0, 0)):
                owner = max(owner, attempt)
            if event["type"] == "TokensGenerated" and attempt == owner and event["first"] == count:
                count += len(event["token_ids"])
                print(event["text"], end="", flush=True)
            if event["type"] == "InferenceRejected" and owner != (0, 0):
                continue  # whoever refused it didn't know that another admission had let it in
            if event["type"] in ("InferenceCompleted", "InferenceFailed", "InferenceRejected"):
                held_back = "".join(choice["text"] for choice in event.get("choices", ()))  # for a possible stop string
                print(f"{held_back}\n[{event['type']}, {request_id}] {event.get('message', '')}")
                return


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        question = sys.stdin.read() if sys.argv[3] == "-" else sys.argv[3]
        asyncio.run(ask(json.load(file), sys.argv[2], question, *sys.argv[4:5]))
