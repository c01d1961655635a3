"""Makes the leader of a consumer group share all partitions, also those of topics that its broker has forgotten for a moment.

A broker that has just started again answers before it has read of all topics. aiokafka's group leader, and Faust's, take a topic that the
cluster doesn't name for one that doesn't exist and share nothing of it: every member then believes that it has its share, and nothing is read
until the leader's metadata are five minutes old. So the leader asks again for a while before it shares, and goes on asking afterwards; once it
hears of the topic, aiokafka shares anew. Until then the leader's process isn't ready: no other member can tell that nobody reads the topic.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from aiokafka.consumer.group_coordinator import GroupCoordinator

from infra.objections import objecting

MISSING_WAIT_S = 3.0
"""So long topics are waited for that the cluster doesn't name: they may not exist."""
MISSING_LOOK_S = 0.2
FORGOTTEN_LOOK_S = 1.0

log = structlog.get_logger("infra.sharing")

_original = GroupCoordinator._perform_assignment  # noqa: SLF001


def share_forgotten_topics() -> None:
    """Make all groups that this process leads share so. Calling it again changes nothing."""
    GroupCoordinator._perform_assignment = _share  # noqa: SLF001


async def _share(self: Any, response: Any) -> Any:
    shares = await _original(self, response)
    if not _missing(self):
        return shares
    until_s = time.monotonic() + MISSING_WAIT_S
    while _missing(self) and time.monotonic() < until_s:
        await asyncio.sleep(MISSING_LOOK_S)
        await self._client.force_metadata_update()
    if missing := _missing(self):
        log.warning("the cluster doesn't name what the group shares", group=self.group_id, topics=missing)
        looking = asyncio.create_task(_look(self, self.generation), name=f"topics of {self.group_id}")
        self._looking = looking  # which keeps it
    return await _original(self, response)


def _missing(coordinator: Any) -> list[str]:
    """The topics that members read and the cluster, as last heard, doesn't have."""
    cluster = coordinator._client.cluster  # noqa: SLF001
    return sorted(topic for topic in coordinator._group_subscription if not cluster.partitions_for_topic(topic))  # noqa: SLF001


async def _look(coordinator: Any, generation: int) -> None:
    """Asks again until each topic is there or the group has been shared anew. aiokafka hears of every answer."""
    topics = ", ".join(_missing(coordinator))
    with objecting(f"nobody in the group {coordinator.group_id} reads {topics}: the broker doesn't name that yet"):
        while True:
            await asyncio.sleep(FORGOTTEN_LOOK_S)
            over = coordinator.generation != generation or coordinator._closing.done()  # noqa: SLF001  # who closes answers nobody
            if over or not _missing(coordinator):
                return
            await coordinator._client.force_metadata_update()  # noqa: SLF001
