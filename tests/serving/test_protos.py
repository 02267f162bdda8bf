"""The wire contract: stubs as fresh as the proto files, buf clean, and the pages of the API complete."""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import google.rpc
import pytest

from scripts.api import ROOT, page
from serving import client

NAMES = ("retrieval_service", "gallery_service", "model_service", "open_inference")
BUF = shutil.which("buf") or shutil.which("buf", path=Path(sys.executable).parent)

needs_buf = pytest.mark.skipif(BUF is None, reason="buf is not installed")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All proto files compiled into one set, with comments and what they import."""
    grpc_tools = pytest.importorskip("grpc_tools")
    path = tmp_path_factory.mktemp("image") / "crossbatch.binpb"
    folders = [
        Path("."),
        Path(grpc_tools.__file__).parent / "_proto",
        Path(google.rpc.__path__[0]).parents[1],
    ]
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", *(f"-I{folder}" for folder in folders),
            "--include_imports", "--include_source_info", f"--descriptor_set_out={path}",
            *(f"protos/{name}.proto" for name in NAMES),
        ],
        check=True, cwd=ROOT,
    )  # fmt: skip
    return path


def test_the_committed_stubs_are_those_that_the_script_writes(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "protos", tmp_path], check=True, env=environment)
    written = sorted(path.name for path in (tmp_path / "protos").iterdir())
    assert written == sorted(
        f"{name}{end}" for name in NAMES for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    )
    for name in written:
        assert (tmp_path / "protos" / name).read_text() == (ROOT / "protos" / name).read_text(), (
            f"protos/{name} is not what scripts/protos writes; run it"
        )


@needs_buf
def test_buf_finds_nothing(image: Path) -> None:
    assert BUF is not None
    done = subprocess.run(
        [BUF, "lint", image, "--config", "buf.yaml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@needs_buf
def test_the_contract_breaks_no_client_of_the_one_that_was_released(image: Path) -> None:
    """`scripts/protos --baseline` renews the baseline at a release; a break needs a package v2."""
    assert BUF is not None
    line = [BUF, "breaking", str(image), "--against", "protos/baseline.binpb", "--config", "buf.yaml"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_floors_of_the_project_run_the_stubs() -> None:
    """Generated code refuses a runtime that is older than the compiler."""
    stub = (ROOT / "protos" / "model_service_pb2.py").read_text()
    grpc_stub = (ROOT / "protos" / "model_service_pb2_grpc.py").read_text()
    needed = {
        "protobuf": re.findall(r"Protobuf Python Version: ([\d.]+)", stub)[0],
        "grpcio": re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", grpc_stub)[0],
    }
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, version in needed.items():
        (floor,) = re.findall(rf"^{name}>=([\d.]+)", "\n".join(dependencies), re.MULTILINE)
        assert _numbers(floor) >= _numbers(version), f"{name}>={floor} cannot run stubs made for {version}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


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
