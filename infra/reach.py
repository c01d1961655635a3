"""Whether the log can be reached: waited for at the start, and asked again and again from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from aiokafka.errors import KafkaError

from infra.kafka import refusal
from infra.settings import KafkaSettings
from infra.topics import partition_counts
from schemas.errors import HeadraceError
from schemas.reasons import Reason

LOOK_AGAIN_S = 1.0
SAY_AGAIN_S = 10.0
"""How often a process that waits says so."""
REFUSALS_MAX = 2
"""A cluster that starts up may drop a connection in a way that looks like a refusal; one that refuses does so again."""
ANSWER_WAIT_S = 3.0
"""A broker that takes longer to say what topics there are can't be reached."""

log = structlog.get_logger("reach")


async def until_reached(
    settings: KafkaSettings, topics: Iterable[str], stop: asyncio.Event, told: Callable[[str], None]
) -> bool:
    """Wait until the cluster answers and has these topics; False if `stop` is set first. `told` hears what is missing.

    Raises HeadraceError (unavailable) if the cluster answers and doesn't let this process in.
    """
    loop = asyncio.get_running_loop()
    wanted, refusals, said, say_at_s = tuple(topics), 0, "", 0.0
    while not stop.is_set():
        missing, refused = await _missing(settings, wanted)
        if not missing:
            return True
        refusals = refusals + 1 if refused else 0
        if refusals >= REFUSALS_MAX:
            raise HeadraceError(Reason.UNAVAILABLE, missing)
        told(missing)
        if missing != said or loop.time() >= say_at_s:
            log.warning("waiting for the log", missing=missing)
            said, say_at_s = missing, loop.time() + SAY_AGAIN_S
        try:
            await asyncio.wait_for(stop.wait(), LOOK_AGAIN_S)
        except TimeoutError:
            pass
    return False


async def _missing(settings: KafkaSettings, topics: tuple[str, ...]) -> tuple[str, bool]:
    """What is missing, or nothing; and whether the cluster refuses this process."""
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            known = await partition_counts(settings)
    except TimeoutError:
        return f"Kafka at {settings.bootstrap} doesn't answer", False
    except HeadraceError as error:
        cause = error.__cause__ or error
        why = await refusal(settings)
        words = why or f"can't be reached: {cause}"
        return f"Kafka at {settings.bootstrap} {words}", why is not None
    absent = sorted(set(topics) - known.keys())
    if not absent:
        return "", False
    return (
        f"Kafka at {settings.bootstrap} has no {', '.join(absent)} (run `headrace topics ensure`), "
        "or this user may not see them (`headrace topics acl`)"
    ), False


async def silence(client: Any, settings: KafkaSettings) -> str | None:
    """Ask a started client's cluster for its metadata; why it can't be reached, or None if it answered in time."""
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            answered = await client.force_metadata_update()
    except (TimeoutError, KafkaError, OSError):
        answered = False
    return None if answered else f"Kafka at {settings.bootstrap} doesn't answer"
