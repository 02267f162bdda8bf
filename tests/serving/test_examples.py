"""The examples for other languages: every call, message and field that they name is one of the contract."""

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf import json_format, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.client import Client, Item
from serving.gallery.directory import GalleryDirectory
from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.settings import Settings
from serving.web.app import Page
from tests.pictures import encoded, picture
from tests.serving.rpc_fakes import FakeEncoder, serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = [each.DESCRIPTOR for each in (retrieval_service_pb2, gallery_service_pb2, model_service_pb2)]
SERVICES = {service.name: service for file in FILES for service in file.services_by_name.values()}
METHODS = {method.name: method for service in SERVICES.values() for method in service.methods}


MESSAGES = [message for file in FILES for message in file.message_types_by_name.values()]
MESSAGES += [inner for message in MESSAGES for inner in message.nested_types]
FIELDS = {each.name for message in MESSAGES for each in (*message.fields, *message.oneofs)}


def blocks(page: str, language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", (EXAMPLES / page).read_text(), re.M | re.S))


def camel(name: str) -> str:
    """A field's name as @grpc/proto-loader writes it, unless it is told to keep the case."""
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


def go(name: str) -> str:
    """A name as protoc-gen-go writes it."""
    return re.sub(r"(?:^|_)([a-z])", lambda found: found[1].upper(), name)


def go_names() -> set[str]:
    """Every struct and constructor of the Go stubs; each field of a oneof has a struct of its own."""
    names = {f"New{service}Client" for service in SERVICES}
    for message in MESSAGES:
        name = go(message.name)
        name = f"{go(message.containing_type.name)}_{name}" if message.containing_type else name
        wrappers = [f"{name}_{go(field.name)}" for field in message.fields if field.containing_oneof]
        names |= {name, *wrappers, *(f"{each}_" for each in wrappers)}  # "_" where a message has that name
    return names


def test_grpcurl_asks_with_requests_of_the_contract() -> None:
    text = blocks("grpcurl.md", "sh").replace("\\\n", " ")
    in_line = re.findall(r"-d '(\{.*?\})'\s+localhost:50051\s+crossbatch\.v1\.(\w+)/(\w+)", text, re.S)
    piped = re.findall(r"printf '(.*?)' .*? -d @ localhost:50051 crossbatch\.v1\.(\w+)/(\w+)", text, re.S)
    assert (len(in_line), len(piped)) == (text.count("-d '{"), text.count("-d @")) == (12, 2)
    for body, service, method in in_line + piped:
        assert METHODS[method].containing_service is SERVICES[service]
        request = message_factory.GetMessageClass(METHODS[method].input_type)
        json_format.ParseDict(json.loads(body.replace("%s", "AAAA")), request())
    assert set(re.findall(r"crossbatch\.v1\.(\w+)\b", text)) <= set(SERVICES)
    assert health_pb2.DESCRIPTOR.services_by_name["Health"].full_name in text
    assert f"-max-msg-sz {MAX_MESSAGE_BYTES}" in text


def test_node_names_calls_and_fields_as_its_loader_does() -> None:
    text = blocks("node.md", "js")
    clients = dict(re.findall(r"const (\w+) = new crossbatch\.v1\.(\w+)\(", text))
    asked = re.findall(r"(?:call|patiently)\((\w+), '(\w+)', ", text)
    assert len(asked) >= 7
    assert set(clients.values()) == set(SERVICES)
    for client, name in asked:
        method = METHODS[name[0].upper() + name[1:]]
        assert method.containing_service is SERVICES[clients[client]]
    known = {camel(name) for name in FIELDS} | {"fields", "stringValue", "numberValue", "brand", "price"}
    bodies = re.findall(r"(?:call|patiently)\(\w+, '\w+', (\{.*?\})\)", text)
    bodies += re.findall(r"const (?:metadata|items|filter|queries) = (.*);", text)
    for body in bodies:
        named = re.findall(r"(?<=[{ ])(\w+)(?=:[^/]| [,}]|,)", re.sub(r"'[^']*'", "''", body))
        assert {each for each in named if not each.isdigit()} <= known, body
    read = set(re.findall(r"\b(?:hit|model|each|results\[0\])\.(\w+)", text)) - {"type_url", "close"}
    assert read <= known
    assert "64 * 1024 * 1024" in text


def test_go_names_messages_fields_and_calls_as_its_generator_does() -> None:
    text = blocks("go.md", "go")
    used = set(re.findall(r"\bpb\.(\w+)", text))
    assert len(used) >= 14
    assert used <= go_names()
    literals = re.sub(r'"[^"\n]*"|//.*', "", text)
    of_grpc = {"Time", "Timeout"}  # of its keepalive
    assert set(re.findall(r"[{,\t ]([A-Z]\w*): ", literals)) - of_grpc <= {go(name) for name in FIELDS}
    clients = dict(re.findall(r"(\w+) := pb\.New(\w+)Client\(", text))
    calls = re.findall(rf"\b({'|'.join(clients)})\.(\w+)\(ctx, &pb\.(\w+)\{{", text)
    assert len(calls) == 5
    for client, method, request in calls:
        assert METHODS[method].containing_service is SERVICES[clients[client]]
        assert request == METHODS[method].input_type.name
    details = [error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, status_pb2.Status]
    fields = FIELDS | {field.name for each in details for field in each.DESCRIPTOR.fields}
    assert set(re.findall(r"\.Get(\w+)\(\)", text)) <= {go(name) for name in fields}
    assert "limit = 64 << 20" in text


def test_the_asynchronous_service_answers(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("async_service", EXAMPLES / "async_service.py")
    assert spec is not None
    assert spec.loader is not None
    service = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(service)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path)) as running:
        with Client(running.address) as client:
            client.create("shoes")
            client.upsert("shoes", [Item("boot", image=b"boot"), Item("shoe", image=b"shoe")])
        answers = asyncio.run(service.main(running.address, "shoes", b"boot", b"bad", b"shoe"))
    assert [status for status, _ in answers] == [200, 400, 200]
    assert [told[0].key for status, told in answers if status == 200] == ["boot", "shoe"]
    ((status, told),) = asyncio.run(service.main("127.0.0.1:1", "shoes", b"boot"))
    assert (status, "try again" in told) == (503, True)


@contextmanager
def translated(by: str, folder: Path, server: str) -> Iterator[str]:
    """JSON over HTTP before a server, by itself or by Envoy; gives the address."""
    if by == "crossbatch":
        with Page(Settings.model_validate({"model": ["m"], "galleries": "g", "web_port": 0})) as page:
            page.start(server)
            yield page.address.removeprefix("http://").rstrip("/")
        return
    descriptor = folder / "crossbatch.binpb"
    line = [str(EXAMPLES.parent / "scripts" / "protos"), "--descriptor", str(descriptor)]
    subprocess.run(line, check=True, env=os.environ | {"PYTHON": sys.executable})
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = (EXAMPLES / "envoy-json.yaml").read_text().replace("8080", address.partition(":")[2])
    (folder / "envoy.yaml").write_text(config.replace("50051", server.partition(":")[2]))
    words = ["envoy.yaml", "--disable-hot-restart", "--log-level", "error", "--concurrency", "1"]
    with subprocess.Popen([Path(sys.executable).with_name("envoy"), "-c", *words], cwd=folder) as envoy:
        yield address
        envoy.terminate()


@pytest.mark.parametrize("by", ["crossbatch", "envoy"])
def test_the_commands_of_the_page_on_json_do_what_it_says(tmp_path: Path, by: str) -> None:
    (tmp_path / "photo.jpg").write_bytes(encoded(picture(1), "JPEG"))
    page = (EXAMPLES.parent / "docs" / "http.md").read_text()
    _, commands, _ = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    commands += "curl localhost:8080/v1/galleries/boots\n"
    with (
        serving(FakeEncoder(), GalleryDirectory(tmp_path / "g")) as running,
        translated(by, tmp_path, running.address) as address,
    ):
        commands = commands.replace("localhost:8080", address).replace(
            "curl ", "curl -s --retry-connrefused --retry 20 --retry-delay 1 --retry-max-time 15 "
        )
        done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True)
    told = json.loads("[" + done.stdout.replace("}{", "},{") + "]")
    created, stored, found, updated, counted, having, values, fields, *told = told
    others, item, listed, dropped, failed = told
    assert [(each["key"], bool(each["thumbnail"])) for each in having["items"]] == [("a/1", True)]
    assert values == {"values": [{"value": {"string": "acme"}, "items": "1"}], "distinct": "1"}
    assert [each["name"] for each in fields["fields"]] == ["brand", "price"]
    assert (updated["updated"], counted, others["results"]) == (1, {"items": "1"}, [{}])
    assert (created["gallery"]["thumbnail_side"], stored["stored"], dropped) == (128, 1, {})
    assert [(hit["key"], hit["metadata"]) for hit in found["results"][0]["hits"]] == [("a/1", {"price": 9.5})]
    assert item["thumbnail"]
    assert item["item"]["key"] == listed["items"][0]["key"] == "a/1"
    assert (failed["code"], failed["details"][0]["reason"]) == (5, "NOT_FOUND")
