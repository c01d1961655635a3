"""`headrace chat`: talk to a model through the front door, with the times that matter."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from cli.context import console, print_json
from schemas.errors import HeadraceError
from schemas.reasons import Reason, lookup

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
SILENCE_MAX_S = 120.0
"""The front door sends a keep-alive far more often than this."""
HISTORY_MAX = 64
DONE = "[DONE]"
TEXT_INPUT = "text_input"
"""What a language model takes by the Open Inference Protocol; others take tensors, or texts by another name."""


@dataclass(slots=True)
class Answer:
    """One streamed answer, and when its parts came: seconds from the call."""

    request_id: str = ""
    text: str = ""
    first_token_s: float | None = None
    total_s: float = 0.0
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None for a shorter answer."""
        made = self.usage.get("completion_tokens", 0)
        took = self.total_s - (self.first_token_s or 0.0)
        return (made - 1) / took if made > 1 and took > 0 and self.first_token_s is not None else None

    def timings(self) -> str:
        """The times as one line."""
        parts = [f"{self.usage.get('completion_tokens', '?')} tokens in {self.total_s:.2f} s"]
        if self.first_token_s is not None:
            parts.append(f"first token after {self.first_token_s * 1000:.0f} ms")
        if (rate := self.tokens_per_s) is not None:
            parts.append(f"then {rate:.1f} tokens/s")
        return ", ".join(parts)


def ask(client: httpx.Client, body: dict[str, Any], answer: Answer) -> Iterator[str]:
    """The answer's text, piece by piece as it comes; fills in `answer`. Raises HeadraceError with the front door's own words."""
    began = time.monotonic()
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=stream) as response:
        answer.request_id = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            response.read()
            raise refusal(response)
        for data in _data(response):
            if data == DONE:
                break
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise HeadraceError(lookup(str(error.get("code"))), str(error.get("message")))
            answer.request_id = answer.request_id or str(chunk.get("id", ""))
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices", ()):
                piece = (choice.get("delta") or {}).get("content") or ""
                if piece and answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - began
                answer.text += piece
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                if piece:
                    yield piece
        else:
            raise HeadraceError(Reason.UNAVAILABLE, "the front door broke off before the answer's end")
    answer.total_s = time.monotonic() - began


def _data(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event; comments keep the connection alive and say nothing."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def refusal(response: httpx.Response) -> HeadraceError:
    """The front door's refusal, in its own words."""
    try:
        error = response.json()["error"]
        return HeadraceError(lookup(str(error["code"])), f"{response.status_code}: {error['message']}")
    except (ValueError, KeyError, TypeError):
        return HeadraceError(Reason.UNAVAILABLE, f"the front door answered {response.status_code} with no reason")


def make_client(url: str, key: str) -> httpx.Client:
    """A client for the front door; no proxy stands before it."""
    import httpx

    timeout = httpx.Timeout(SILENCE_MAX_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=timeout, trust_env=False)


def first_model(client: httpx.Client) -> str:
    """The first model that talks. Raises HeadraceError (model_not_found) if none that is served does."""
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise refusal(response)
    served = response.json()["data"]
    if not served:
        raise HeadraceError(Reason.MODEL_NOT_FOUND, "no model is served yet: `headrace models list`")
    found = next((str(model["id"]) for model in served if _talks(client, str(model["id"]))), None)
    if found is None:
        text = "no model that talks is served; `headrace embed` and `headrace classify` ask the others"
        raise HeadraceError(Reason.MODEL_NOT_FOUND, text)
    return found


def _talks(client: httpx.Client, model: str) -> bool:
    """Whether a model takes a text and goes on with it."""
    response = client.get(f"/v2/models/{quote(model, safe='')}")
    if response.status_code != 200:
        raise refusal(response)
    return any(taken["name"] == TEXT_INPUT for taken in response.json()["inputs"])


@click.command()
@click.argument("model", required=False)
@click.option("--message", help="Ask this one thing and end; without it, a conversation.")
@click.option("--system", help="A system message to begin with.")
@click.option("--max-tokens", type=click.IntRange(1), help="The longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option("--url", help="The front door (HEADRACE_URL; default: the one that `headrace up` runs).")
@click.option("--key", help="The API key (HEADRACE_API_KEY; default: the one that `headrace up` made).")
@click.option("--json", "as_json", is_flag=True, help="Print the answer with its times as JSON; needs --message.")
def chat(
    model: str | None,
    message: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Talk to MODEL (default: the first that talks)."""
    from cli.front_door import front_door

    if as_json and not message:
        raise click.UsageError("--json needs --message")
    body: dict[str, Any] = {"temperature": temperature}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    opening = [{"role": "system", "content": system}] if system else []
    with front_door(url, key) as client:
        body["model"] = model or first_model(client)
        if message:
            once(client, body, [*opening, {"role": "user", "content": message}], as_json)
        else:
            converse(client, body, opening)


def once(client: httpx.Client, body: dict[str, Any], messages: list[dict[str, str]], as_json: bool) -> None:
    """Asks one thing and prints the answer, piece by piece or as JSON."""
    answer = Answer()
    for piece in ask(client, {**body, "messages": messages}, answer):
        if not as_json:
            click.echo(piece, nl=False)
    if as_json:
        times = {"first_token_s": answer.first_token_s, "total_s": answer.total_s, "tokens_per_s": answer.tokens_per_s}
        facts = {
            "request_id": answer.request_id,
            "model": body["model"],
            "text": answer.text,
            "finish_reason": answer.finish_reason,
        }
        print_json(facts | {"usage": answer.usage} | times)
        return
    click.echo()
    console(stderr=True).print(f"{answer.timings()}; {answer.request_id}", style="dim")


def converse(client: httpx.Client, body: dict[str, Any], messages: list[dict[str, str]]) -> None:
    """Reads questions until the end of input. Ctrl-C while an answer comes stops the answer, not the conversation."""
    tty = sys.stdin.isatty()
    console(stderr=True).print(
        f"[bold]{body['model']}[/] at {client.base_url}. An empty line or Ctrl-D ends.", style="dim"
    )
    while True:
        try:
            asked = input("you> " if tty else "").strip()
        except EOFError:
            break
        if not asked:
            break
        messages.append({"role": "user", "content": asked})
        del messages[:-HISTORY_MAX]
        try:
            once_answer = _speak(client, {**body, "messages": messages})
        except HeadraceError as error:
            messages.pop()
            console(stderr=True).print(f"headrace: {error.message}", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": once_answer.text})


def _speak(client: httpx.Client, body: dict[str, Any]) -> Answer:
    answer = Answer()
    try:
        for piece in ask(client, body, answer):
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False)
    click.echo()
    console(stderr=True).print(f"{answer.timings()}; {answer.request_id}", style="dim")
    return answer
