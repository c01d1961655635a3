"""`headrace dead-letters`: records that no process could handle, and what operators do about them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cli.context import console, data_dir, kafka_settings, print_json, run_async, table
from cli.records import Read, plain, shown
from cli.registry import now_ms
from schemas.errors import HeadraceError, Undecodable
from schemas.events import DeadLetterSettled, Event, PayloadStored, RecordDeadLettered
from schemas.payloads import PayloadUnreadable, outline_of
from schemas.reasons import Reason
from schemas.topics import DEAD_LETTERS, MINUTE_MS

if TYPE_CHECKING:
    from infra.log import EventDecoder, EventProducer
    from infra.payloads import Payloads
    from infra.settings import KafkaSettings

RETRIED, DROPPED, OPEN = "retried", "dropped", "open"
GRANT_MS = 5 * MINUTE_MS
MESSAGE_SHOWN_CHARS = 80
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")
IDS = click.argument("letters", nargs=-1, type=click.IntRange(0), metavar="ID…")


def _which(command: Callable[..., None]) -> Callable[..., None]:
    """The options that choose among letters."""
    for option in (
        click.option("--reason", metavar="REASON", help="Only those put aside for this reason."),
        click.option("--topic", metavar="TOPIC", help="Only those of this topic."),
    ):
        command = option(command)
    return command


@dataclass(slots=True)
class Letter:
    """A dead letter, by its offset, or the first one's if its record was put aside more than once: then `others` are the later ones.

    Its event's value is kept only where it was asked for; `settled` says what was done about it.
    """

    number: int
    at_ms: int
    event: RecordDeadLettered
    settled: DeadLetterSettled | None = None
    others: list[int] = field(default_factory=list)

    @property
    def same(self) -> str:
        """That its record has more letters; empty if it hasn't."""
        numbers = ", ".join(map(str, self.others))
        return f"the record of {numbers}, too: it was put aside {1 + len(self.others)} times" if self.others else ""

    @property
    def state(self) -> str:
        """open, retried or dropped."""
        return OPEN if self.settled is None else self.settled.outcome

    def as_json(self) -> dict[str, Any]:
        """What a script reads, without the record's value."""
        event = self.event
        out = {"id": self.number, "at_ms": self.at_ms, "state": self.state, "topic": event.topic}
        out |= {"partition": event.partition, "offset": event.offset, "key": plain(event.key)}
        out |= {"reason": event.reason, "message": event.message, "process": event.process}
        out |= {"others": self.others} if self.others else {}
        return out | ({"request_id": self.settled.request_id} if self.settled and self.settled.request_id else {})


@click.group("dead-letters")
def dead_letters() -> None:
    """Records that could not be handled, with the reason: see them, ask them again, or drop them."""


@dead_letters.command("list")
@_which
@click.option("--all", "everything", is_flag=True, help="Those that were retried or dropped, too.")
@JSON
def list_(topic: str | None, reason: str | None, everything: bool, as_json: bool) -> None:
    """The open letters, oldest first."""
    found = run_async(_chosen(kafka_settings(), topic, reason, everything=everything))
    if as_json:
        for letter in found:
            print_json(letter.as_json())
        return
    rows = table(">id", "when", "state", "record", "reason", "why")
    for letter in found:
        event = letter.event
        place = f"{event.topic}:{event.partition} offset {event.offset}"
        rows.add_row(str(letter.number), _time(letter.at_ms), letter.state, place, event.reason, _cut(event.message))
    console().print(rows if found else "No dead letters are open.")


@dead_letters.command()
@click.argument("letter", type=click.IntRange(0), metavar="ID")
@JSON
def show(letter: int, as_json: bool) -> None:
    """One letter whole: the record as it was, without its grant. A record that was put aside more than once has one letter, under any of its numbers."""
    found, record = run_async(_record(kafka_settings(), letter))
    if as_json:
        value = record.as_json()
        print_json(
            found.as_json()
            | {name: value[name] for name in ("headers", "stored", "event", "undecodable", "value") if name in value}
        )
        return
    out, event = console(), found.event
    out.print(f"letter {found.number}" + (f", {found.same}" if found.same else ""))
    out.print(f"{event.topic}:{event.partition} offset {event.offset}, written {_time(event.timestamp_ms)}")
    out.print(f"put aside by {event.process} at {_time(found.at_ms)}: {event.reason}: {event.message}")
    out.print(
        f"state: {found.state}"
        + (f" as {found.settled.request_id}" if found.settled and found.settled.request_id else "")
    )
    out.print(f"key: {plain(event.key)}")
    for name, text in record.headers.items():
        out.print(f"header {name}: {text}")
    out.print(f"{record.name}: {shown(record)}")


@dead_letters.command()
@IDS
@_which
@click.option("--all", "everything", is_flag=True, help="All open letters, or those of --topic and --reason.")
@click.option("--tenant", metavar="NAME", help="Whose requests they are, where the records don't say.")
@JSON
def retry(
    letters: tuple[int, ...], topic: str | None, reason: str | None, everything: bool, tenant: str | None, as_json: bool
) -> None:
    """Ask the requests in these letters again, each under a new id; answers come on the tenant's own topic, and in `answers`."""
    from infra.settings import grant_secret

    settings, secret = kafka_settings(), grant_secret(data_dir())
    _settle(letters, topic, reason, everything, as_json, lambda chosen: _retry(settings, secret, chosen, tenant))


@dead_letters.command()
@IDS
@_which
@click.option("--all", "everything", is_flag=True, help="All open letters, or those of --topic and --reason.")
@JSON
def drop(letters: tuple[int, ...], topic: str | None, reason: str | None, everything: bool, as_json: bool) -> None:
    """Be done with these letters: `list` no longer shows them. The log keeps them until their time is over."""
    settings = kafka_settings()

    async def dropped(chosen: list[Letter]) -> list[dict[str, Any]]:
        async with _producer(settings) as producer:
            return [await _done(producer, letter, DeadLetterSettled(letter.number, DROPPED)) for letter in chosen]

    _settle(letters, topic, reason, everything, as_json, dropped)


# --- choosing ------------------------------------------------------------------------------------------------------------


def _settle(
    numbers: tuple[int, ...],
    topic: str | None,
    reason: str | None,
    everything: bool,
    as_json: bool,
    act: Callable[[list[Letter]], Awaitable[list[dict[str, Any]]]],
) -> None:
    """Chooses open letters, acts, and prints what became of each. Exits with 1 if one of them could not be settled."""
    if bool(numbers) == everything or (numbers and (topic or reason)):
        raise click.UsageError("give the ids of letters, or --all with or without --topic and --reason")

    async def work() -> list[dict[str, Any]]:
        settings = kafka_settings()
        found = await _chosen(settings, topic, reason, everything=bool(numbers), keep=None if everything else numbers)
        return await act(_these(found, numbers) if numbers else found)

    outcomes = run_async(work())
    for outcome in outcomes:
        if as_json:
            print_json(outcome)
        else:
            console().print(_told(outcome))
    if not outcomes and not as_json:
        console().print("No dead letters are open.")
    if any("error" in outcome for outcome in outcomes):
        raise click.exceptions.Exit(1)


def _told(outcome: dict[str, Any]) -> str:
    more = outcome.get("error") or outcome.get("request_id") or ""
    others = ", ".join(map(str, outcome.get("others", ())))
    with_them = f" (with {others}, of the same record)" if others else ""
    return f"{outcome['id']}: {outcome['state']}{with_them}{': ' + more if more else ''}"


def _these(found: list[Letter], numbers: Collection[int]) -> list[Letter]:
    """The letters with these numbers, each once, whichever of its numbers is given."""
    known = {number: letter for letter in found for number in (letter.number, *letter.others)}
    for number in numbers:
        if number not in known:
            raise _unknown(number)
        if (state := known[number].state) != OPEN:
            raise HeadraceError(Reason.CONFLICT, f"dead letter {number} was {state} already")
    return list({known[number].number: known[number] for number in numbers}.values())


def _unknown(number: int) -> HeadraceError:
    return HeadraceError(
        Reason.NOT_FOUND, f"there is no dead letter {number}; `headrace dead-letters list --all` shows all"
    )


async def _chosen(
    settings: KafkaSettings,
    topic: str | None,
    reason: str | None,
    *,
    everything: bool,
    keep: Collection[int] | None = (),
) -> list[Letter]:
    """The letters, open ones only unless `everything`. The values of those in `keep` (None: all) are kept."""
    from decisions.dead_letters import Letters
    from infra.log import EventDecoder
    from infra.read import read_to_end

    decoder, found, letters = EventDecoder(settings), dict[int, Letter](), Letters()
    async for record in read_to_end(settings, DEAD_LETTERS):
        try:
            event = await decoder.decode(record.value)
        except Undecodable:
            continue
        if isinstance(event, RecordDeadLettered):
            wanted = keep is None or record.offset in keep
            if letters.hear(record.offset, event):
                kept = event if wanted else replace(event, value=None)
                found[record.offset] = Letter(record.offset, record.timestamp, kept)
                continue
            first = found[letters.number(record.offset)]
            first.others.append(record.offset)
            if wanted:
                first.event = replace(first.event, value=event.value)
        elif isinstance(event, DeadLetterSettled) and (number := letters.number(event.letter)) in found:
            found[number].settled = event
    return [
        letter
        for letter in found.values()
        if (everything or letter.settled is None)
        and topic in (None, letter.event.topic)
        and reason in (None, letter.event.reason)
    ]


async def _record(settings: KafkaSettings, number: int) -> tuple[Letter, Read]:
    """A letter, and the record in it, decoded."""
    from infra.log import EventDecoder

    found = await _chosen(settings, None, None, everything=True, keep=(number,))
    letter = next((letter for letter in found if number in (letter.number, *letter.others)), None)
    if letter is None:
        raise _unknown(number)
    return letter, await _read(letter, EventDecoder(settings))


async def _read(letter: Letter, decoder: EventDecoder) -> Read:
    held = letter.event
    event: Event | None = None
    problem: str | None = None
    stored: PayloadStored | None = None
    try:
        event = await decoder.decode_record(held.value)
        if isinstance(event, PayloadStored):
            stored, event = event, outline_of(event, decoder.codec) or event
    except Undecodable as error:
        problem = error.message
    headers = {name: str(plain(value)) for name, value in held.headers.items()}
    place = (held.topic, held.partition, held.offset, held.timestamp_ms)
    return Read(*place, held.key, headers, held.value, event, problem, stored)


# --- acting --------------------------------------------------------------------------------------------------------------


async def _retry(
    settings: KafkaSettings, secret: bytes, letters: list[Letter], tenant: str | None
) -> list[dict[str, Any]]:
    from infra.log import EventDecoder
    from infra.payloads import Payloads
    from infra.settings import ProcessSettings

    outcomes, payloads = [], Payloads.of(ProcessSettings.from_env())
    decoder = EventDecoder(settings, payloads)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(payloads.close)
        producer = await cleanup.enter_async_context(_producer(settings, payloads))
        for letter in letters:
            try:
                new_id = await _ask_again(settings, secret, producer, decoder, await _read(letter, decoder), tenant)
            except HeadraceError as error:
                if error.retriable:
                    raise
                outcomes.append({"id": letter.number, "state": OPEN, "error": error.message})
                continue
            outcomes.append(await _done(producer, letter, DeadLetterSettled(letter.number, RETRIED, new_id)))
    return outcomes


async def _ask_again(
    settings: KafkaSettings,
    secret: bytes,
    producer: EventProducer,
    decoder: EventDecoder,
    record: Read,
    tenant: str | None,
) -> str:
    """Writes the request in a record under a new id, which is returned, with a grant of its tenant's."""
    from cli.tenants import grant_for
    from decisions.dead_letters import askable, asked_again, tenant_of, tier_of
    from schemas.ids import request_id
    from schemas.topics import GRANT_HEADER, requests_topic

    askable(record.topic)
    name = tenant or tenant_of(record.key, record.stored or record.event)
    event = record.event
    if record.stored is not None:
        event = await _followed(decoder, record.stored, name or record.stored.tenant)
    request = asked_again(event, request_id(now_ms(), secrets.token_bytes(10)))
    tier = tier_of(record.topic, event)
    if name is None:
        raise HeadraceError(Reason.INVALID_REQUEST, "the record has no key, so nobody knows whose it is; give --tenant")
    given = await grant_for(settings, secret, name, None, (tier,), GRANT_MS, "json")
    headers = ((GRANT_HEADER, str(given["grant"]).encode()),)
    await producer.send_and_wait(requests_topic(tier), request, key=name, headers=headers, owner=name)
    return request.request_id


async def _followed(decoder: EventDecoder, reference: PayloadStored, tenant: str) -> Event:
    """What a record refers to, if it is the tenant's. It is asked with a payload of its own: an object serves one id."""
    from decisions.dead_letters import followed

    followed(reference, tenant)
    try:
        return await decoder.follow(reference)
    except PayloadUnreadable as error:
        if error.retriable:
            raise
        text = "its content is gone from the object store, which keeps payloads for less time than the log keeps dead letters; its caller must ask anew"
        raise HeadraceError(error.reason, text) from error


async def _done(producer: EventProducer, letter: Letter, settled: DeadLetterSettled) -> dict[str, Any]:
    await producer.send_and_wait(DEAD_LETTERS, settled, key=letter.event.topic)
    letter.settled = settled
    return letter.as_json()


@asynccontextmanager
async def _producer(settings: KafkaSettings, payloads: Payloads | None = None) -> AsyncIterator[EventProducer]:
    from infra.log import EventProducer

    producer = EventProducer(settings, "cli", payloads)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_SHOWN_CHARS else text[: MESSAGE_SHOWN_CHARS - 1] + "…"
