"""Use Headrace through the log alone: write a request, read the answer. Needs only aiokafka.

headrace tenants grant default --json > grant.json
python docs/direct.py grant.json smollm2 "What is the capital of France?"
"""

import asyncio
import json
import os
import secrets
import sys
import time
import uuid

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

KAFKA = os.environ.get("HEADRACE_KAFKA", "127.0.0.1:9092").removeprefix("kafka://")


async def ask(grant: dict, model: str, question: str) -> None:
    made_ms = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    request_id = str(uuid.UUID(int=made_ms & ~(0xF << 76 | 0x3 << 62) | 7 << 76 | 2 << 62))  # a UUIDv7
    request = {"type": "InferenceRequested", "request_id": request_id, "model": model}
    request |= {"messages": [{"role": "user", "content": question}], "sampling": {"max_tokens": 32, "temperature": 0}}
    kafka = {"bootstrap_servers": KAFKA}
    async with AIOKafkaConsumer(**kafka) as consumer, AIOKafkaProducer(**kafka) as producer:
        answers = TopicPartition(grant["topic"], grant["partition"])
        consumer.assign([answers])
        await consumer.seek_to_end(answers)
        headers = [("grant", grant["grant"].encode())]
        await producer.send_and_wait(
            "requests.batch", json.dumps(request).encode(), grant["tenant"].encode(), headers=headers
        )
        count = 0
        async for record in consumer:
            event = json.loads(record.value)
            if event["request_id"] != request_id:
                continue
            if event["type"] == "TokensGenerated" and event["first"] == count:  # else: sent twice
                count += len(event["token_ids"])
                print(event["text"], end="", flush=True)
            if event["type"] in ("InferenceCompleted", "InferenceFailed", "InferenceRejected"):
                held_back = "".join(choice["text"] for choice in event.get("choices", ()))  # for a possible stop string
                print(f"{held_back}\n[{event['type']}, {request_id}] {event.get('message', '')}")
                return


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        asyncio.run(ask(json.load(file), sys.argv[2], sys.argv[3]))
