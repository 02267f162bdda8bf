"""docs/api.md has a line for every call, field, limit, error and method, and its examples run."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving import errors
from serving.client import Client, GalleryInfo, Hit, Item, ModelInfo, StoredItem
from serving.rpc import limits
from serving.rpc.status import CODES, reason_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
FILES = [module.DESCRIPTOR for module in (retrieval_service_pb2, gallery_service_pb2, model_service_pb2)]


def section(title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/api.md has no section {title}"
    return found[1]


def test_every_service_and_call_has_a_section_with_each_field() -> None:
    for file in FILES:
        for service in file.services_by_name.values():
            section(service.name)
            for method in service.methods:
                text = section(method.name)
                for field in (*method.input_type.fields, *method.output_type.fields):
                    assert f"`{field.name}`" in text or f"`{field.name}`" in PAGE, (
                        f"{method.name}: {field.name}"
                    )
                for field in method.input_type.fields:
                    assert f"`{field.name}`" in text, f"{method.name}: {field.name}"


def test_every_field_of_every_message_is_named() -> None:
    for file in FILES:
        for message in file.message_types_by_name.values():
            for each in (message, *message.nested_types):
                for field in each.fields:
                    assert f"`{field.name}`" in PAGE, f"{each.full_name}.{field.name}"


def test_every_error_has_its_line_with_code_and_reason() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        (line,) = re.findall(rf"^\| `{name}` \| .*$", PAGE, re.MULTILINE)
        reason = "INTERNAL" if kind is errors.CrossbatchError else reason_of(kind("x"))
        assert [cell.strip() for cell in line.split("|")[2:4]] == [CODES[kind].name, reason]


def test_every_method_of_the_client_has_its_line() -> None:
    for name, _ in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            assert re.search(rf"^\|.*`{name}\(", section("The Python client"), re.MULTILINE), name


@pytest.mark.parametrize("record", [Hit, Item, StoredItem, GalleryInfo, ModelInfo])
def test_every_attribute_of_a_record_is_named(record: type) -> None:
    (line,) = re.findall(rf"^\| `{record.__name__}` \| (.*) \|$", section("The Python client"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", line) == [field.name for field in dataclasses.fields(record)]


def test_every_limit_is_the_one_of_the_code() -> None:
    said = {
        "MAX_INPUTS": f"1 to {limits.MAX_INPUTS}",
        "MAX_K": f"| `k` | 1 to {limits.MAX_K:,}, {limits.DEFAULT_K} when absent",
        "MAX_HITS": f"at most {limits.MAX_HITS:,}",
        "MAX_EXCLUDED": f"| `exclude_keys` | at most {limits.MAX_EXCLUDED:,} |",
        "MAX_FILTER_LEVELS": f"{limits.MAX_FILTER_LEVELS} levels deep, with",
        "MAX_FILTER_CONDITIONS": f"at most {limits.MAX_FILTER_CONDITIONS:,} conditions and values",
        "MAX_PAGE": f"`page_size` (0 to {limits.MAX_PAGE:,}; 0 stands for {limits.DEFAULT_PAGE})",
        "MAX_DELETED_KEYS": f"`keys` (1 to {limits.MAX_DELETED_KEYS:,};",
        "MAX_MESSAGE_BYTES": f"at most {limits.MAX_MESSAGE_BYTES >> 20} MiB in either direction",
        "MAX_BYTES_IN_FLIGHT": f"{limits.MAX_BYTES_IN_FLIGHT >> 20} MiB together",
    }
    assert set(said) == {name for name in limits.__all__ if name.startswith("MAX_")}
    for name, text in said.items():
        assert text in " ".join(PAGE.split()), name
