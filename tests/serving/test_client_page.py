"""docs/client.md has a line for every method and record of the Python client, and no limit on it is stale."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from serving.client import (
    BuildProgress,
    Client,
    Explanation,
    GalleryInfo,
    Hit,
    Item,
    ModelInfo,
    Reloaded,
    StoredItem,
)

RECORDS = [Hit, Item, StoredItem, GalleryInfo, ModelInfo, Explanation, BuildProgress, Reloaded]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()


def test_every_method_of_the_client_has_its_line() -> None:
    for name, _ in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            assert re.search(rf"^\|.*`{name}\(", PAGE, re.MULTILINE), name


@pytest.mark.parametrize("record", RECORDS)
def test_every_attribute_of_a_record_is_named(record: type) -> None:
    (line,) = re.findall(rf"^\| `{record.__name__}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == [field.name for field in dataclasses.fields(record)]
