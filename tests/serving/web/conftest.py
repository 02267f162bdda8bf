"""A page before a server with a fake encoder, and a gallery of three items."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.rpc_fakes import FakeEncoder
from tests.serving.web.pages import Browser, paged


@pytest.fixture
def browser(encoder: FakeEncoder, memory: Path) -> Iterator[Browser]:
    with paged(memory, encoder) as browser:
        yield browser


@pytest.fixture
def shoes(browser: Browser) -> Browser:
    """With a gallery `shoes` of the items boot, shoe and clog."""
    browser.ok("POST", "/v1/galleries", {"name": "shoes"})
    items = [
        {
            "key": key,
            "image": base64.b64encode(key.encode()).decode(),
            "label": key[0],
            "metadata": {"price": i},
        }
        for i, key in enumerate(("boot", "shoe", "clog"))
    ]
    browser.ok("POST", "/v1/galleries/shoes/items", {"items": items})
    return browser
