"""The wire contract: stubs as fresh as the proto files, buf clean, every field explained."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import google.rpc
import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("retrieval_service", "gallery_service", "model_service", "open_inference")
PACKAGES = ("crossbatch.v1", "inference")
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
    assert _breaks(image) == ""


@needs_buf
@pytest.mark.parametrize("change", ["field deleted", "call deleted"])
def test_a_change_that_breaks_clients_is_found(image: Path, tmp_path: Path, change: str) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    (file,) = (each for each in files.file if each.name == "protos/retrieval_service.proto")
    if change == "call deleted":
        del file.service[0].method[0]
    else:
        (message,) = (each for each in file.message_type if each.name == "EmbedRequest")
        del message.field[0]
    changed = tmp_path / "changed.binpb"
    changed.write_bytes(files.SerializeToString())
    told = _breaks(changed)
    assert "protos/retrieval_service.proto" in told
    assert ("RetrievalService" if change == "call deleted" else "EmbedRequest") in told


def _breaks(image: Path) -> str:
    """What buf says of the changes from the committed baseline to an image."""
    assert BUF is not None
    line = [BUF, "breaking", str(image), "--against", "protos/baseline.binpb", "--config", "buf.yaml"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 100), done.stderr  # 100: something was found
    return done.stdout


def test_every_service_call_message_and_field_is_explained(image: Path) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    ours = [file for file in files if file.package in PACKAGES]
    assert len(ours) == len(NAMES)
    for file in ours:
        explained = {
            tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location
        }
        for s, service in enumerate(file.service):
            assert explained.get((6, s)), service.name
            for m, method in enumerate(service.method):
                assert explained.get((6, s, 2, m)), method.name
        for n, message in enumerate(file.message_type):
            for f, field in enumerate(message.field):
                assert explained.get((4, n, 2, f)), f"{message.name}.{field.name}"
            for i, inner in enumerate(message.nested_type):
                if inner.options.map_entry:  # made by the compiler
                    continue
                assert explained.get((4, n, 3, i)), inner.name
                for f, field in enumerate(inner.field):
                    assert explained.get((4, n, 3, i, 2, f)), f"{inner.name}.{field.name}"


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
        (floor,) = (
            found[1] for line in dependencies if (found := re.fullmatch(rf"{name}>=([\d.]+)(,.*)?", line))
        )
        assert _numbers(floor) >= _numbers(version), f"{name}>={floor} cannot run stubs made for {version}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
