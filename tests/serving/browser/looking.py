"""A person at the page: what they open, drop and read; and what must not happen meanwhile."""

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Request, expect

from serving.client.client import Client

SECONDS = 15  # a busy machine is no error
expect.set_options(timeout=1000 * SECONDS)

FILE = """([data, name, type]) => {
  const held = new DataTransfer(), bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  held.items.add(new File([bytes], name, {type}));
  return held;
}"""


@dataclass
class Site:
    """A server with its page: the address of the page, and that of gRPC."""

    url: str
    address: str

    def client(self, **given: Any) -> Client:
        return Client(self.address, **given)

    def link(self, view: str, **fields: Any) -> str:
        return f"{self.url}#/{view}?{urlencode(fields)}"


@dataclass
class Watch:
    """Contexts of a browser, and the faults that were seen in them: each test ends with none.

    Faults are errors on the console, among them whatever the content security policy refused; exceptions that
    nobody caught; dialogs; and requests to another origin.
    """

    browser: Browser
    origins: set[str]
    contexts: list[BrowserContext] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    meant: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def visit(self, url: str = "", **options: Any) -> Page:
        """Open a tab in a context of its own, as another person would."""
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        context.set_default_timeout(1000 * SECONDS)
        context.on("console", self._told)
        context.on("weberror", lambda error: self.faults.append(f"exception: {error.error}"))
        context.on("dialog", self._asked)
        context.on("request", self._sent)
        self.contexts.append(context)
        page = context.new_page()
        if url:
            page.goto(url)
        return page

    def expect(self, pattern: str) -> None:
        """Take errors of this kind on the console for meant: of a call that the server is to refuse."""
        self.meant.append(pattern)

    def unmeant(self) -> list[str]:
        return [each for each in self.faults if not any(re.search(kind, each) for kind in self.meant)]

    def close(self) -> None:
        for context in self.contexts:
            context.close()

    def _told(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.faults.append(f"{message.text} ({message.location['url']})")

    def _asked(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _sent(self, request: Request) -> None:
        self.requests.append(request.url)
        place = urlsplit(request.url)
        if place.scheme not in ("data", "blob") and f"{place.scheme}://{place.netloc}/" not in self.origins:
            self.faults.append(f"request to {request.url}")


def state(page: Page) -> dict[str, str]:
    """What is looked at, as the address has it."""
    view, _, query = urlsplit(page.url).fragment.partition("?")
    return {"view": view.strip("/"), **dict(parse_qsl(query))}


def until(page: Page, told: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Wait for an address."""
    page.wait_for_url(lambda _: told(state(page)))
    return state(page)


def keys(page: Page, place: str = "#results") -> list[str]:
    """The keys of the cards that are shown, once they have come."""
    cards = page.locator(f"{place} .card:visible")
    expect(cards.first).to_be_visible()
    expect(page.locator("[aria-busy=true]")).to_have_count(0)
    found: list[str] = cards.evaluate_all("all => all.map((each) => each.dataset.key)")
    return found


def found(page: Page) -> list[str]:
    """The keys of the results of a search."""
    expect(page.locator("#found")).to_be_visible()
    return keys(page)


def card(page: Page, key: str, place: str = "main") -> Any:
    return page.locator(f"{place} .card").filter(has=page.locator(f".key[title={_quoted(key)}]"))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def drop(page: Page, path: Path, kind: str = "image/jpeg") -> None:
    """Drop a file on the page."""
    page.dispatch_event("main", "drop", {"dataTransfer": _held(page, path, kind)})


def paste(page: Page, path: Path, kind: str = "image/jpeg") -> None:
    """Paste a file."""
    page.evaluate(
        "held => document.body.dispatchEvent(new ClipboardEvent('paste', "
        "{clipboardData: held, bubbles: true, cancelable: true}))",
        _held(page, path, kind),
    )


def _held(page: Page, path: Path, kind: str) -> Any:
    data = base64.b64encode(path.read_bytes()).decode()
    return page.evaluate_handle(FILE, [data, path.name, kind])


def drag(page: Page, place: str, *points: tuple[float, float]) -> None:
    """Drag over an element, along points that are shares of its sides."""
    page.locator(place).scroll_into_view_if_needed()
    box = page.locator(place).bounding_box()
    assert box
    for step, (x, y) in enumerate(points):
        page.mouse.move(
            box["x"] + x * box["width"], box["y"] + y * box["height"], steps=1 if step == 0 else 4
        )
        if step == 0:
            page.mouse.down()
    page.mouse.up()
