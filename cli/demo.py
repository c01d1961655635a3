"""`headrace up --demo`: one real question, its answer as it comes, and the events that it left in the log; then what small models say."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.threads import in_thread
from schemas.errors import HeadraceError
from schemas.processors import BYTES_CLASSIFICATION, EMBEDDING, TEXT_CLASSIFICATION

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from cli.chat import Answer
    from cli.stack import Stack
    from cli.timeline import Timeline
    from infra.models_file import ModelEntry

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64
TEXTS = ("The river turns the wheel.", "Water drives the mill.", "The invoice is due on Friday.")
ENDING_WAIT_S = 10.0
POLL_S = 0.2


def talks(models: tuple[ModelEntry, ...]) -> list[ModelEntry]:
    """Those that take a question."""
    return [entry for entry in models if entry.engine != "onnx"]


async def ask(stack: Stack, out: Console) -> Answer:
    """Asks the question of the first model that talks and prints the answer piece by piece. Raises HeadraceError."""
    from cli.chat import Answer, make_client
    from cli.chat import ask as stream

    model = talks(stack.options.models)[0].name
    answer = Answer()
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    out.print(f"\n[bold]{QUESTION}[/]")

    def work() -> None:
        import httpx

        try:
            with make_client(stack.url, stack.key) as client:
                for piece in stream(client, body, answer):
                    out.print(piece, end="", markup=False)
                    out.file.flush()
        except httpx.TransportError as error:
            from schemas.reasons import Reason

            raise HeadraceError(Reason.UNAVAILABLE, f"the answer broke off: {type(error).__name__}") from error

    await in_thread(work, "demo")
    out.print(f"\n[dim]{model}: {answer.timings()}[/]\n")
    return answer


async def show_events(stack: Stack, request_id: str, out: Console) -> Timeline:
    """Prints what the request left in the log, once its ending is there."""
    from cli.explain import event_table, read_timeline

    timeline = await read_timeline(stack.kafka, request_id)
    give_up_at = asyncio.get_running_loop().time() + ENDING_WAIT_S
    while not any(step.read.name == "InferenceAnswered" for step in timeline.steps):
        if asyncio.get_running_loop().time() > give_up_at:
            break
        await asyncio.sleep(POLL_S)
        timeline = await read_timeline(stack.kafka, request_id)
    out.print(f"What it left in the log ({timeline.request_id}):")
    out.print(event_table(timeline))
    return timeline


async def show_small(stack: Stack, out: Console) -> None:
    """Asks each small model something, and prints what it says. Raises HeadraceError."""
    for entry in stack.options.models:
        if entry.processor == EMBEDDING:
            await _embed(stack, entry.name, out)
        elif entry.processor in (TEXT_CLASSIFICATION, BYTES_CLASSIFICATION):
            await _classify(stack, entry, out)


async def _embed(stack: Stack, model: str, out: Console) -> None:
    from cli.small import embedded, likeness

    def work() -> list[list[float]]:
        with _client(stack) as client:
            return embedded(client, model, TEXTS)

    first, *others = await in_thread(work, "demo")
    out.print(f"[bold]How like “{TEXTS[0]}” is …[/]")
    for text, vector in zip(TEXTS[1:], others, strict=True):
        out.print(f"  “{text}”: {likeness(first, vector):.3f}")
    out.print(f"[dim]{model}: {len(TEXTS)} embeddings of {len(first)} numbers[/]\n")


async def _classify(stack: Stack, entry: ModelEntry, out: Console) -> None:
    from cli.small import Item, classified, item_of

    is_bytes = entry.processor == BYTES_CLASSIFICATION
    item = item_of(Path(__file__)) if is_bytes else Item(TEXTS[0], TEXTS[0], len(TEXTS[0]))

    def work() -> list[dict[str, Any]]:
        with _client(stack) as client:
            return classified(client, entry.name, [item], 3)

    (found,) = await in_thread(work, "demo")
    out.print(f"[bold]What is {Path(item.name).name if is_bytes else f'“{item.name}”'}?[/]")
    for each in found["classes"]:
        out.print(f"  {each['label']}: {each['score']:.3f}", markup=False)
    out.print(f"[dim]{entry.name}[/]\n")


def _client(stack: Stack) -> contextlib.AbstractContextManager[httpx.Client]:
    from cli.front_door import front_door

    return front_door(stack.url, stack.key)
