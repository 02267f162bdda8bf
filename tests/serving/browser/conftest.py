"""One Chromium and one server for all tests here; a context for each."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.serving.browser import shop
from tests.serving.browser.looking import Site, Watch
from tests.serving.processes import Launched, launched


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Not for the session: while it is open, no other test could run asyncio."""
    program = shutil.which("chromium")
    if program is None:
        told = "these tests need Chromium: apt-get install chromium"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served(models: Path, galleries: Path, *words: str) -> Iterator[tuple[Launched, Site]]:
    """Serve with a page, as a user does."""
    with launched(models, galleries, "--web-port", "0", *words) as server:
        assert server.process.stdout is not None
        line = server.process.stdout.readline()
        told = re.fullmatch(r"page on (http://127\.0\.0\.1:\d+/)\n", line)
        assert told, line
        yield server, Site(told[1], server.address)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models` and an empty `galleries`."""
    root = tmp_path_factory.mktemp("shop")
    for name in ("models", "galleries"):
        (root / name).mkdir()
    shop.models(root / "models")
    return root


@pytest.fixture(scope="package")
def site(folder: Path) -> Iterator[Site]:
    """The server, with all galleries of the shop."""
    with served(folder / "models", folder / "galleries") as (_, site):
        shop.fill(site.address, folder / "galleries")
        yield site


@pytest.fixture
def watch(chromium: Browser, site: Site) -> Iterator[Watch]:
    watch = Watch(chromium, {site.url})
    yield watch
    watch.close()
    assert watch.unmeant() == []


@pytest.fixture
def page(watch: Watch) -> Page:
    """An empty tab."""
    return watch.visit()
