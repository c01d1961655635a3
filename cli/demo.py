"""`headrace up --demo`: one real question, its answer as it comes, and the events that it left in the log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cli.threads import in_thread
from schemas.errors import HeadraceError

if TYPE_CHECKING:
    from rich.console import Console

    from cli.chat import Answer
    from cli.stack import Stack
    from cli.timeline import Timeline

QUESTION = "What is the capital of France?"
MAX_TOKENS = 64
ENDING_WAIT_S = 10.0
POLL_S = 0.2


async def ask(stack: Stack, out: Console) -> Answer:
    """Asks the question of the first model and prints the answer piece by piece. Raises HeadraceError."""
    from cli.chat import Answer, make_client
    from cli.chat import ask as stream

    model = stack.options.models[0].name
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
