"""Clients close at once, whatever their brokers do: one that doesn't answer a goodbye, or is away, holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from aiokafka.conn import AIOKafkaConnection

from infra.broker import HOST, EmbeddedKafka
from infra.kafka import make_consumer, stop_consumer
from infra.read import assign_all
from tests.system.secured import Authority

SOON_S = 10.0
"""Much less than the 30 s that asyncio and uvloop wait for a goodbye."""


@pytest.fixture
def silent_peer(tmp_path: Path) -> Iterator[tuple[int, ssl.SSLContext]]:
    """A TLS server that takes one connection and never reads from it again: its port, and how to trust it."""
    authority = Authority(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*authority.issue("broker"))
    over = threading.Event()
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()

        def serve() -> None:
            taken, _ = listening.accept()
            with contextlib.suppress(OSError), server.wrap_socket(taken, server_side=True):
                over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1], ssl.create_default_context(cafile=str(authority.file))
        over.set()
        thread.join()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_over_tls_waits_for_no_goodbye(silent_peer: tuple[int, ssl.SSLContext], new_loop) -> None:
    port, context = silent_peer

    async def main() -> None:
        connection = AIOKafkaConnection(HOST, port, ssl_context=context, security_protocol="SSL")
        connection._do_version_lookup = lambda: asyncio.sleep(0)
        await connection.connect()
        async with asyncio.timeout(SOON_S):
            await connection.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_a_consumer_whose_fetches_fail_stops(spare_broker: EmbeddedKafka, topic_of) -> None:
    topic = await topic_of(spare_broker.settings)
    consumer = make_consumer(spare_broker.settings)
    await consumer.start()
    await assign_all(consumer, topic)
    await asyncio.to_thread(spare_broker.kill)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(consumer.getmany(), 1.0)
    async with asyncio.timeout(SOON_S):
        await stop_consumer(consumer)
    assert not consumer._client._conns
