"""The Open Inference Protocol as NVIDIA's tritonclient speaks it, from an environment of its own.

It cannot be imported here: it wants an older protobuf, and names its messages as ours are named.
"""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from serving.gallery.directory import GalleryDirectory
from tests.serving.inference_calls import GRID, PROTOTYPES, expected, explained, pixels_of
from tests.serving.rpc_fakes import FakeEncoder, FakeSpec, serving

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-tritonclient" / "bin" / "python"
PHOTOS = [b"photo 0", b"photo 1", b"photo 2"]


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


def test_tritonclient_is_answered_as_by_any_other_server(tmp_path: Path) -> None:
    encoder = FakeEncoder(FakeSpec(prototypes=PROTOTYPES, grid=GRID))
    histograms, assignments = zip(*map(explained, PHOTOS), strict=True)
    np.savez(
        tmp_path / "expected.npz",
        pixels=pixels_of(encoder, *PHOTOS),
        embeddings=expected(*PHOTOS),
        histograms=np.stack(histograms),
        assignments=np.stack(assignments),
    )
    with serving(encoder, GalleryDirectory(tmp_path / "galleries")) as running:
        run("tests/serving/triton_caller.py", running.address, tmp_path / "expected.npz")


def test_the_example_runs_and_is_what_the_pages_show(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jpg" for i in range(len(PHOTOS))]
    for path, photo in zip(paths, PHOTOS, strict=True):
        path.write_bytes(photo)
    with serving(FakeEncoder(), GalleryDirectory(tmp_path / "galleries")) as running:
        said = run("examples/triton.py", running.address, *paths)
    np.testing.assert_allclose(np.loadtxt(said.splitlines(), np.float32), expected(*PHOTOS), atol=1e-6)
    example = (ROOT / "examples" / "triton.py").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert "tritonclient" not in block or block in example, page
