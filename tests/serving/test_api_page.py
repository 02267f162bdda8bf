"""docs/api.md is what scripts/api.py makes of the contract; docs/client.md has every method and record."""

import dataclasses
import inspect
import re

from scripts.api import ROOT, page
from serving import client

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_page_is_of_today() -> None:
    assert page() == PAGE, "run `python scripts/api.py`"


def test_every_field_is_explained() -> None:
    assert len(re.findall(r"^\| `\w+` \| .+ \| .+ \|$", PAGE, re.MULTILINE)) > 100
    assert not re.findall(r"^\| .*\| *\|$", PAGE, re.MULTILINE)


def test_the_contents_lead_to_every_section_in_order() -> None:
    head, _, rest = PAGE.partition("\n## ")
    links = re.findall(r"\[([^]]+)\]\(#([a-z0-9-]+)\)", head)
    assert [title for title, _ in links] == re.findall(r"^##+ (.+)$", f"## {rest}", re.MULTILINE)
    assert {"Search", "Filter.Value", "Limits", "Errors"} <= {title for title, _ in links}
    for title, anchor in links:  # as GitHub makes it
        assert anchor == title.lower().replace(".", "").replace(" ", "-")


def test_every_method_and_record_of_the_python_client_is_on_its_page() -> None:
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    for name, _ in inspect.getmembers(client.Client, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            assert re.search(rf"^\|.*`{name}\(", text, re.MULTILINE), name
    for name in set(client.__all__) - {"AsyncClient", "Client"}:
        (line,) = re.findall(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
        fields = dataclasses.fields(getattr(client, name))
        assert re.findall(r"`(\w+)`", line) == [each.name for each in fields]
