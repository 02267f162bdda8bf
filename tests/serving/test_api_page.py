"""docs/api.md is what scripts/api.py makes of the contract; docs/client.md has every method and record."""

import dataclasses
import inspect
import re

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from scripts.api import ROOT, page
from serving import client
from serving.rpc import limits
from serving.rpc.status import CODES

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
FILES = [module.DESCRIPTOR for module in (retrieval_service_pb2, gallery_service_pb2, model_service_pb2)]


def test_the_page_is_of_today() -> None:
    assert page() == PAGE, "run `python scripts/api.py`"


def test_every_call_and_field_is_on_it() -> None:
    for file in FILES:
        for service in file.services_by_name.values():
            assert re.search(rf"^## {service.name}$", PAGE, re.MULTILINE)
            for method in service.methods:
                assert re.search(rf"^### {method.name}$", PAGE, re.MULTILINE), method.name
        for message in file.message_types_by_name.values():
            for each in (message, *message.nested_types):
                for field in each.fields:
                    assert re.search(rf"^\| `{field.name}` \| .+ \| .+ \|$", PAGE, re.MULTILINE), (
                        field.full_name
                    )


def test_the_contents_lead_to_every_section_in_order() -> None:
    head, _, rest = PAGE.partition("\n## ")
    links = re.findall(r"\[([^]]+)\]\(#([a-z0-9-]+)\)", head)
    assert [title for title, _ in links] == re.findall(r"^##+ (.+)$", f"## {rest}", re.MULTILINE)
    assert {"Search", "Filter.Value", "Limits", "Errors"} <= {title for title, _ in links}
    for title, anchor in links:  # as GitHub makes it
        assert anchor == title.lower().replace(".", "").replace(" ", "-")


def test_every_error_and_limit_is_on_it() -> None:
    for kind, code in CODES.items():
        (line,) = re.findall(rf"^\| `{kind.__name__}` \| .*$", PAGE, re.MULTILINE)
        assert line.split("|")[2].strip() == code.name
    for name in limits.__all__:
        (line,) = re.findall(rf"^\| `{name}` \| .*$", PAGE, re.MULTILINE)
        assert line.split("|")[2].strip() == f"{getattr(limits, name):,}"


def test_every_method_and_record_of_the_python_client_is_on_its_page() -> None:
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    for name, _ in inspect.getmembers(client.Client, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            assert re.search(rf"^\|.*`{name}\(", text, re.MULTILINE), name
    for name in set(client.__all__) - {"AsyncClient", "Client"}:
        (line,) = re.findall(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
        fields = dataclasses.fields(getattr(client, name))
        assert re.findall(r"`(\w+)`", line) == [each.name for each in fields]
