"""`/docs` in a real browser: all that it loads comes from the front door, and what it shows can be tried there."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.async_api import ConsoleMessage, Locator, Page, Request, Response, async_playwright, expect

from bridge.openapi import document
from tests.system.running import MODEL, RunningStack

CHROMIUM = Path("/usr/bin/chromium")
HOST = "front-door.test"
"""Not this machine's own name: Swagger UI asks others' servers about a document only if it isn't on localhost."""
ARGUMENTS = ("--no-sandbox", "--no-proxy-server", f"--host-resolver-rules=MAP {HOST} 127.0.0.1")


@dataclass
class Visit:
    """The page, every address that it asked for, and what went wrong."""

    page: Page
    requests: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", self._answered)
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))

    def _failed(self, request: Request) -> None:
        self.troubles.append(f"{request.url}: {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.troubles.append(f"{response.url}: {response.status}")

    def _logged(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)

    def operation(self, method: str, path: str) -> Locator:
        """One operation's block."""
        return self.page.locator(f".opblock-{method}").filter(has=self.page.locator(f'[data-path="{path}"]'))

    async def open(self, method: str, path: str) -> Locator:
        """The block of an operation, unfolded."""
        block = self.operation(method, path)
        await block.locator(".opblock-summary-control").click()
        await expect(block.locator(".opblock-body")).to_be_visible()
        return block

    async def authorize(self, key: str) -> None:
        """Give the API key for all that is tried from now on."""
        await self.page.locator(".scheme-container .authorize").click()
        dialog = self.page.locator(".modal-ux")
        await dialog.locator("input").fill(key)
        await dialog.locator("button.authorize").click()
        await dialog.locator("button.btn-done").click()
        await expect(dialog).to_have_count(0)


@pytest.fixture
async def docs(stack: RunningStack) -> AsyncIterator[Visit]:
    """`/docs`, opened in Chromium."""
    if not CHROMIUM.exists():
        missing = f"there is no {CHROMIUM}: apt-get install chromium"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        visit = Visit(await browser.new_page())
        await visit.page.goto(f"http://{HOST}:{stack.port}/docs")
        yield visit
        await browser.close()


async def test_it_shows_every_operation_and_asks_nobody_else(stack: RunningStack, docs: Visit) -> None:
    await expect(docs.page).to_have_title("Headrace")
    await expect(docs.page.locator(".info .title")).to_contain_text("Headrace")
    operations = [(method, path) for path, methods in document()["paths"].items() for method in methods]
    await expect(docs.page.locator(".opblock")).to_have_count(len(operations))
    for method, path in operations:
        block = await docs.open(method, path)
        described = document()["paths"][path][method]
        await expect(block).to_contain_text(described["summary"])
        (told,) = [status for status in described["responses"] if status.startswith("2")] or ["405"]  # some only refuse
        await expect(block.locator(".responses-table").first).to_contain_text(told)
    await docs.page.wait_for_load_state("networkidle")
    assert {url.split("/")[2] for url in docs.requests if not url.startswith("data:")} == {f"{HOST}:{stack.port}"}
    assert await docs.page.locator(".errors-wrapper").count() == 0
    assert docs.troubles == []


async def test_calls_can_be_tried(stack: RunningStack, docs: Visit) -> None:
    """The bodies are those that the page offers, but for the model that is served here."""
    await docs.authorize(stack.keys["acme"])
    told = {
        ("get", "/v1/models"): f'"id": "{MODEL}"',
        ("post", "/v1/chat/completions"): '"content": "Name three rivers."',
        ("post", "/v1/completions"): '"text": "The capital of F"',
    }
    for (method, path), words in told.items():
        block = await docs.open(method, path)
        await block.get_by_role("button", name="Try it out").click()
        if method == "post":
            body = block.locator("textarea")
            await body.fill(json.dumps({**json.loads(await body.input_value()), "model": MODEL}))
        await block.get_by_role("button", name="Execute").click()
        answer = block.locator(".live-responses-table")
        await expect(answer.locator(".response-col_status").last).to_contain_text("200")
        await expect(answer).to_contain_text(words)
    assert docs.troubles == []
