"""Use Headrace through the log alone: write a request, read the answer. Needs only aiokafka.

headrace tenants grant default --json > grant.json
python docs/direct.py grant.json smollm2 "What is the capital of France?"

Where the cluster is and how to sign in is told by the variables HEADRACE_KAFKA and HEADRACE_KAFKA_*, as to Headrace's own processes.
"""

import asyncio
import json
import os
import secrets
import sys
import time
import uuid

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.helpers import create_ssl_context


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


async def ask(grant: dict, model: str, question: str) -> None:
    made_ms = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    request_id = str(uuid.UUID(int=made_ms & ~(0xF << 76 | 0x3 << 62) | 7 << 76 | 2 << 62))  # a UUIDv7
    request = {"type": "InferenceRequested", "request_id": request_id, "model": model}
    request |= {"messages": [{"role": "user", "content": question}], "sampling": {"max_tokens": 32, "temperature": 0}}
    kafka = connection()
    async with AIOKafkaConsumer(**kafka) as consumer, AIOKafkaProducer(**kafka) as producer:
        answers = TopicPartition(grant["topic"], grant["partition"])
        consumer.assign([answers])
        await consumer.seek_to_end(answers)
        headers = [("grant", grant["grant"].encode())]
        await producer.send_and_wait(
            "requests.batch", json.dumps(request).encode(), grant["tenant"].encode(), headers=headers
        )
        count, owner = 0, (0, 0)  # of the tokens so far, and who makes them: a former owner may still write
        async for record in consumer:
            event = json.loads(record.value)
            if event["request_id"] != request_id:
                continue
            attempt = tuple((event.get("attempt") or {}).values())
            if event["type"] == "GenerationTakenOver" or (event["type"] == "GenerationStarted" and owner == (0, 0)):
                owner = max(owner, attempt)
            if event["type"] == "TokensGenerated" and attempt == owner and event["first"] == count:
                count += len(event["token_ids"])
                print(event["text"], end="", flush=True)
            if event["type"] in ("InferenceCompleted", "InferenceFailed", "InferenceRejected"):
                held_back = "".join(choice["text"] for choice in event.get("choices", ()))  # for a possible stop string
                print(f"{held_back}\n[{event['type']}, {request_id}] {event.get('message', '')}")
                return


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(ask(json.load(file), sys.argv[2], sys.argv[3]))
