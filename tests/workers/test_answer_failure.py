"""The ending of an answer that failed fits a record, whatever an engine says of it: a caller without an ending waits for ever."""

from __future__ import annotations

from schemas.codec import encode
from schemas.events import InferenceFailed
from schemas.reasons import Reason
from schemas.topics import RECORD_MAX_BYTES
from tests.workers.test_answer import Broker, answer
from workers.engines.port import EngineError
from workers.engines.scripted import read_script


async def test_an_error_that_quotes_the_whole_request_is_cut() -> None:
    prompt = b'{"token_ms": "' + b"\x7f" * 700_000 + b'"}'
    try:
        read_script(prompt)
    except EngineError as error:
        message = error.message
    assert len(message) > RECORD_MAX_BYTES
    broker = Broker(0)
    made = answer(broker)
    made.start((0,), 0.0)
    await made.fail(Reason.ENGINE_ERROR, message)
    made.close()
    ending = broker.events[-1]
    assert isinstance(ending, InferenceFailed)
    assert len(encode(ending)) < 2_000
    assert ending.message.startswith("the script can't be followed")
