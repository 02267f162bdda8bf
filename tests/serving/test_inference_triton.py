"""The Open Inference Protocol as NVIDIA's tritonclient speaks it, from an environment of its own.

It cannot be imported here: it wants an older protobuf, and names its messages as ours are named.
"""

import json
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import open_inference_pb2 as pb
from serving.gallery.directory import GalleryDirectory
from tests.serving.inference_calls import GRID, PROTOTYPES, explained, pixels_of
from tests.serving.rpc_fakes import DIMENSION, SIZE, FakeEncoder, FakeSpec, serving, vector_for

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-tritonclient" / "bin" / "python"
PHOTOS = [b"photo 0", b"photo 1", b"photo 2"]
CONCURRENT = 32


def run(script: str, *words: object) -> str:
    """What a script prints in the environment of tritonclient."""
    if not PYTHON.exists():
        missing = "tritonclient is not there; scripts/tritonclient fetches it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    line = [str(PYTHON), "-I", str(ROOT / script), *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tritonclient was answered by a server of ours."""
    folder = tmp_path_factory.mktemp("triton")
    encoder = FakeEncoder(FakeSpec(prototypes=PROTOTYPES, grid=GRID))
    np.save(folder / "pixels.npy", pixels_of(encoder, *PHOTOS))
    with serving(encoder, GalleryDirectory(folder)) as running:
        said = run("tests/serving/triton_caller.py", running.address, folder / "pixels.npy")
    answers: dict[str, Any] = json.loads(said)
    return answers


def test_tritonclient_finds_the_server_and_its_model(told: dict[str, Any]) -> None:
    found = told["ready"]
    assert found["live"]
    assert found["ready"]
    assert found["models"] == {"fake/": True, "fake/1": True, "fake/2": False, "other/": False}
    assert found["server"] == {"name": "crossbatch", "version": metadata.version("crossbatch")}
    model = found["model"]
    assert model["versions"] == ["1", "a" * 12]
    assert {each["name"]: (each["datatype"], each["shape"]) for each in model["inputs"]} == {
        "images": ("UINT8", ["-1", str(SIZE), str(SIZE), "3"]),
        "encoded": ("BYTES", ["-1"]),
    }
    assert {each["name"]: (each["datatype"], each["shape"]) for each in model["outputs"]} == {
        "embeddings": ("FP32", ["-1", str(DIMENSION)]),
        "histograms": ("FP32", ["-1", str(PROTOTYPES)]),
        "assignments": ("UINT8", ["-1", *map(str, GRID)]),
    }


@pytest.mark.parametrize("given", ["pixels", "row", "column"])
def test_tritonclient_gets_every_output_of_every_kind_of_input(told: dict[str, Any], given: str) -> None:
    name, version, mark, arrays = told["inferred"][given]
    assert (name, version, mark) == ("fake", "1", given)
    assert list(arrays) == ["assignments", "embeddings", "histograms"]
    for i, photo in enumerate(PHOTOS):
        histogram, assignments = explained(photo)
        np.testing.assert_array_equal(np.float32(arrays["embeddings"][i]), vector_for(photo))
        np.testing.assert_array_equal(np.float32(arrays["histograms"][i]), histogram)
        np.testing.assert_array_equal(arrays["assignments"][i], assignments)


def test_tritonclient_with_many_calls_at_once(told: dict[str, Any]) -> None:
    photos = [b"photo %d" % i for i in range(CONCURRENT)]
    np.testing.assert_array_equal(np.float32(told["at once"]), [vector_for(photo) for photo in photos])


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("model", "NOT_FOUND", "There is no model 'other'"),
        ("version", "NOT_FOUND", "There is no version '2' of the model fake"),
        ("type", "INVALID_ARGUMENT", "inputs[0].datatype: The tensor images is UINT8"),
        ("image", "INVALID_ARGUMENT", "encoded[1]: These bytes hold no image."),
        ("extension", "UNIMPLEMENTED", ""),
    ],
)
def test_tritonclient_is_told_what_is_wrong(
    told: dict[str, Any], fault: str, code: str, message: str
) -> None:
    status, said = told["refusals"][fault]
    assert status == f"StatusCode.{code}"
    assert said.startswith(message)


def test_the_messages_are_those_of_tritonclient(told: dict[str, Any]) -> None:
    ours: dict[str, Any] = {}
    waiting = list(pb.DESCRIPTOR.message_types_by_name.values())
    for message in waiting:
        waiting.extend(message.nested_types)
        ours[message.full_name] = {field.name: [field.number, field.type] for field in message.fields}
    assert len(ours) == 23  # with those that the compiler makes of maps
    assert {name: told["contract"][name] for name in ours} == ours


def test_the_example_runs_and_is_what_the_pages_show(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jpg" for i in range(len(PHOTOS))]
    for path, photo in zip(paths, PHOTOS, strict=True):
        path.write_bytes(photo)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path / "galleries")) as running:
        said = run("examples/triton.py", running.address, *paths)
    found = np.loadtxt(said.splitlines(), np.float32)
    np.testing.assert_allclose(found, [vector_for(photo) for photo in PHOTOS], atol=1e-6)
    example = (ROOT / "examples" / "triton.py").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert "tritonclient" not in block or block in example, page
