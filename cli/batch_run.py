"""Runs a batch job: writes requests to `requests.batch`, reads their answers from `answers`, and puts them into the output.

One task reads the input and asks, no more at once than the window holds; one reads answers. What was asked before the job was cut off is
first looked for in `answers`, and then asked again under the same id, which the log recognises. Positions in `answers` are kept only up to the oldest answer
that isn't in the output yet.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cli.batch_again import error_of
from cli.batch_away import AWAY_MAX_S, AWAY_POLL_S, follow
from cli.batch_files import PAUSE_LINES, JobFiles
from cli.batch_flights import Flight, fault_of, refused, size_of
from cli.batch_grant import Granted
from cli.batch_lines import Line, failed, outputs_of, requests_of
from decisions.job_retries import Then, verdict
from decisions.jobs import SPLIT_PART, Job, Part, gathered, part_of, reserved
from infra.kafka import make_consumer, stop_consumer
from infra.log import EventDecoder, EventProducer, NotDelivered, RecordTooLarge
from infra.objects import StoreAway
from infra.payloads import Payloads
from infra.read import assign_all, reached
from infra.settings import KafkaSettings
from schemas.errors import HeadraceError, Undecodable
from schemas.events import Event, InferenceAnswered, PayloadStored
from schemas.reasons import Reason, lookup
from schemas.topics import ANSWERS, BATCH, GRANT_HEADER, requests_topic

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

WINDOW_BYTES_MAX = 64 * 1024 * 1024
SPAN_UNITS_MAX = 100_000
"""How far ahead of the oldest unanswered unit others are asked."""
PAUSE_UNITS = 100
"""After so many units answers have their turn, though none had to be waited for."""
SAVE_S = 1.0
POLL_MS = 200
POLL_RECORDS_MAX = 2_000

_TOPIC = requests_topic(BATCH)


class Runner:
    """One job's run. `told` is called whenever lines were put into the output."""

    def __init__(
        self,
        job: Job,
        files: JobFiles,
        settings: KafkaSettings,
        granted: Granted,
        payloads: Payloads | None = None,
        *,
        window: int = 1_024,
        ordered: bool = False,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self.job = job
        self._files = files
        self._settings = settings
        self._granted = granted
        self._payloads = payloads
        self._decoder = EventDecoder(settings, payloads)
        self._window = window
        self._ordered = ordered
        self._told = told
        self._flights: dict[int, Flight] = {}
        self._bytes = 0
        self._room = asyncio.Event()
        self._again: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] | None = None
        self._wait_until_s = 0.0
        self._replaying = True
        self._spoilt = False
        self._unnoted = False
        self._asked = 0
        self._read: dict[int, int] = dict(job.positions)
        self._saved_s = 0.0
        self._all_asked = False
        self._producer: EventProducer | None = None

    async def run(self, lines: Iterator[Line]) -> None:
        """Until every line is in the output. Raises HeadraceError: a grant that doesn't hold, a log that is away."""
        units = enumerate(gathered(lines, Line.weight))
        missing = await self._missing(units)
        self._asked = self.job.asked
        self._broken = asyncio.get_running_loop().create_future()
        self._producer = producer = EventProducer(self._settings, "batch", self._payloads)
        consumer = make_consumer(self._settings)
        try:
            await producer.start()
            await consumer.start()
            ends = await self._assign(consumer)
            for unit, of_unit in missing:
                self._register(unit, of_unit)
            while not await reached(consumer, ends):
                await self._take(consumer)
            self._replaying = False
            await self._both(producer, consumer, units)
        finally:
            for task in self._again:
                task.cancel()
            await asyncio.gather(*self._again, return_exceptions=True)
            self.job.asked = self._asked
            try:
                self._save()
            finally:
                await stop_consumer(consumer)
                await producer.stop()

    async def _missing(self, units: Iterator[tuple[int, list[Line]]]) -> list[tuple[int, list[Line]]]:
        """Of the units that may have been asked, those that aren't in the output.

        Raises HeadraceError (conflict) if the lines of the others aren't as many as the output has: they would be taken for one another.
        """
        missing, there, pause = [], 0, 0
        for unit, lines in itertools.islice(units, self.job.asked):
            if (pause := pause + len(lines)) >= PAUSE_LINES:
                pause = 0
                await asyncio.sleep(0)
            if unit in self.job.units:
                there += len(lines)
            else:
                missing.append((unit, lines))
        if there != (written := self.job.done + self.job.failed - self.job.earlier):
            text = f"the output has {written} lines, and the input has {there} in their place"
            raise HeadraceError(Reason.CONFLICT, f"{text}: this job can't go on; say --new to begin anew")
        return missing

    async def _both(
        self, producer: EventProducer, consumer: AIOKafkaConsumer, units: Iterator[tuple[int, list[Line]]]
    ) -> None:
        assert self._broken is not None
        asking = asyncio.create_task(self._ask_all(producer, units), name="ask")
        reading = asyncio.create_task(self._collect(consumer), name="collect")
        tasks: set[asyncio.Future[None]] = {asking, reading, self._broken}
        try:
            while not (asking.done() and reading.done()):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                tasks -= done
        finally:
            for task in (asking, reading):
                task.cancel()
            await asyncio.gather(asking, reading, return_exceptions=True)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _ask_all(self, producer: EventProducer, units: Iterator[tuple[int, list[Line]]]) -> None:
        for flight in list(self._flights.values()):
            await self._ask(producer, flight)
        for unit, lines in units:
            if unit % PAUSE_UNITS == 0:
                await asyncio.sleep(0)
            await self._until_room(unit)
            if unit >= self.job.asked:
                self._reserve(unit, lines)
            await self._ask(producer, self._register(unit, lines))
        self._all_asked = True

    def _reserve(self, unit: int, lines: list[Line]) -> None:
        size = sum(size_of(request) for line in lines for request in line.requests)
        average = self._bytes // len(self._flights) if self._flights else 0
        self.job.asked = unit + reserved(max(size, average))
        self._save()

    def _register(self, unit: int, lines: list[Line]) -> Flight:
        split = unit in self.job.split
        requests = {} if lines[0].fault is not None else requests_of(lines, split)
        flight = Flight(unit, lines, split, requests, sum(size_of(request) for request in requests.values()))
        self._flights[unit] = flight
        self._asked = max(self._asked, unit + 1)
        self._bytes += flight.size_bytes
        if not requests:  # it can't be asked
            self._show(flight, [failed(line, fault_of(line)) for line in lines])
        return flight

    async def _until_room(self, unit: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if (wait_s := self._wait_until_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            few = len(self._flights) < self._window and self._bytes < WINDOW_BYTES_MAX
            if not self._flights or (few and unit - self.job.units.below < SPAN_UNITS_MAX):
                return
            self._room.clear()
            await self._room.wait()

    async def _ask(self, producer: EventProducer, flight: Flight) -> None:
        for part in list(flight.requests):
            if self._is_open(flight, part):
                await self._send(producer, flight, part)

    def _is_open(self, flight: Flight, part: int) -> bool:
        """Whether an answer to this request is awaited."""
        here = self._flights.get(flight.unit) is flight
        return here and part in flight.requests and part not in flight.answers

    async def _send(self, producer: EventProducer, flight: Flight, part: int) -> None:
        """Into the log; what the log didn't take is sent again, under its id."""
        if self._unnoted:  # the log answers an id once: who goes on after a kill must know that answer for the job's
            self._save()
        request = replace(flight.requests[part], request_id=self.job.id_of(flight.unit, part))
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + AWAY_MAX_S
        while True:
            headers = [(GRANT_HEADER, await self._granted.header())]
            try:
                future = await producer.send(
                    _TOPIC, request, key=self._granted.tenant, headers=headers, owner=self._granted.tenant
                )
            except RecordTooLarge as error:
                self._answer(flight, part, refused(request, self._granted.tenant, error))
                return
            except (NotDelivered, StoreAway):
                if loop.time() > give_up_s:
                    raise
                await asyncio.sleep(AWAY_POLL_S)
                continue
            break

        def confirmed(future: asyncio.Future[object]) -> None:
            if future.cancelled():
                return
            if isinstance(error := future.exception(), RecordTooLarge):
                self._answer(flight, part, refused(request, self._granted.tenant, error))
            elif error is not None:
                self._later(flight, part, AWAY_POLL_S)

        future.add_done_callback(confirmed)

    def _later(self, flight: Flight, part: int, wait_s: float) -> None:
        producer = self._producer
        assert producer is not None, "nothing was asked yet"

        async def again() -> None:
            await asyncio.sleep(wait_s)
            if self._is_open(flight, part):
                await self._send(producer, flight, part)

        def ended(task: asyncio.Task[None]) -> None:
            self._again.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._break(error)

        task = asyncio.create_task(again(), name="ask again")
        self._again.add(task)
        task.add_done_callback(ended)

    def _break(self, error: BaseException) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _assign(self, consumer: AIOKafkaConsumer) -> dict[TopicPartition, int]:
        """Stand where the job left off, or, of a new one, at the end: nothing of it was asked before."""
        from aiokafka import TopicPartition

        starts = {TopicPartition(ANSWERS, number): offset for number, offset in self.job.positions.items()}
        ends = await assign_all(consumer, ANSWERS, starts)
        if not self.job.positions:
            for partition, end in ends.items():
                consumer.seek(partition, end)
                self._read[partition.partition] = end
            self._save()
        return ends

    async def _collect(self, consumer: AIOKafkaConsumer) -> None:
        while not (self._all_asked and not self._flights):
            await self._take(consumer)

    async def _take(self, consumer: AIOKafkaConsumer) -> None:
        prefix = self.job.prefix.encode()
        batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=POLL_RECORDS_MAX)
        for partition, records in batches.items():
            for record in records:
                if record.key is not None and record.key.startswith(prefix):
                    await self._on_record(record)
                self._read[partition.partition] = record.offset + 1
        if asyncio.get_running_loop().time() - self._saved_s > SAVE_S:
            self._save()

    async def _on_record(self, record: ConsumerRecord) -> None:
        try:
            event: Event | None = await self._decoder.decode_record(record.value)
            if isinstance(event, PayloadStored) and self._payloads is not None and self._awaited(event):
                event = await follow(self._decoder, event)
        except Undecodable:
            return
        if not isinstance(event, InferenceAnswered) or (awaited := self._awaited(event)) is None:
            return
        flight, part = awaited
        flight.places.setdefault(record.partition, record.offset)
        self._answer(flight, part, event)

    def _awaited(self, event: InferenceAnswered | PayloadStored) -> tuple[Flight, int] | None:
        """The unit and part that wait for this answer, as they were asked last, or None."""
        part = part_of(event.request_id)
        flight = self._flights.get(part.unit)
        if flight is None or event.tenant not in ("", self._granted.tenant) or not self._is_open(flight, part.part):
            return None
        return (flight, part.part) if part == self.job.part(part.unit, part.part) else None

    def _answer(self, flight: Flight, part: int, event: InferenceAnswered) -> None:
        """A request of a unit is answered: with that it is done, or asked again, or its lines are asked one by one."""
        if self._spoilt:
            return
        now = self.job.part(flight.unit, part)
        if event.error_reason is not None and self._goes_on(flight, now, lookup(event.error_reason), event):
            return
        flight.answers[part] = event
        if len(flight.answers) == len(flight.requests):
            try:
                self._show(flight, outputs_of(flight.lines, flight.answers, flight.split))
            except OSError as error:
                self._spoilt = True
                self._break(self._files.refusing(error))

    def _goes_on(self, flight: Flight, part: Part, reason: Reason, event: InferenceAnswered) -> bool:
        """Whether an error isn't the unit's last word."""
        tries = self.job.tries_of(flight.unit, part.part)
        found = verdict(reason, event.retry_after_ms, tries, 1 if flight.split else len(flight.lines))
        self._unnoted |= found.then is not Then.LAST
        match found.then:
            case Then.LAST:
                return False
            case Then.SPLIT:
                self._split(flight)
            case Then.STOP:
                self.job.try_again(part)
                if self._replaying:  # it stopped the run before this one
                    return True
                told = f"{reason.value}: {event.error_message}; with a grant that holds, run the same again to go on"
                self._break(HeadraceError(reason, told))
            case Then.AGAIN:
                self.job.try_again(part, found.refused, found.failed)
                if self._replaying:  # its wait is long over
                    return True
                until_s = asyncio.get_running_loop().time() + found.all_wait_s
                self._wait_until_s = max(self._wait_until_s, until_s)
                self._later(flight, part.part, found.wait_s)
        return True

    def _split(self, flight: Flight) -> None:
        """One of its lines is at fault: each is asked by itself, so that the others are answered."""
        self.job.split.add(flight.unit)
        flight.split, flight.requests = True, requests_of(flight.lines, split=True)
        flight.places.clear()
        if self._replaying:  # what is open is asked once all was read
            return
        for index in range(len(flight.lines)):
            self._later(flight, SPLIT_PART + index, 0.0)

    # --- the output ---------------------------------------------------------------------------------------------------

    def _show(self, flight: Flight, shown: list[tuple[bytes, bool]]) -> None:
        flight.shown = shown
        if not self._ordered:
            self._write(flight)
        else:
            self._hold(flight, sum(len(line) for line, _ in shown))
            while (ready := self._flights.get(self.job.units.below)) is not None and ready.shown is not None:
                self._write(ready)
        self._room.set()
        self._told()

    def _hold(self, flight: Flight, size_bytes: int) -> None:
        """Of what waits for units before it, its output alone is kept, and counts."""
        flight.lines, flight.requests, flight.answers = [], {}, {}
        self._bytes += size_bytes - flight.size_bytes
        flight.size_bytes = size_bytes

    def _write(self, flight: Flight) -> None:
        assert flight.shown is not None
        self._files.write(b"".join(line for line, _ in flight.shown), self.job)
        good = sum(1 for _, is_answer in flight.shown if is_answer)
        errors = (error_of(line) for line, is_answer in flight.shown if not is_answer)
        self.job.written(flight.unit, good, [error["code"] for error in errors if error is not None])
        del self._flights[flight.unit]
        self._bytes -= flight.size_bytes

    def _save(self) -> None:
        """What is in the output, and from where on answers are still needed."""
        positions = dict(self._read)
        for flight in self._flights.values():
            for partition, offset in flight.places.items():
                positions[partition] = min(positions.get(partition, offset), offset)
        self.job.positions = positions
        self._files.save(self.job)
        self._unnoted = False
        self._saved_s = asyncio.get_running_loop().time()
