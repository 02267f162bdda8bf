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
from tests.serving.inference_calls import expected
from tests.serving.rpc_fakes import FakeEncoder, serving

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-tritonclient" / "bin" / "python"
PHOTOS = [b"photo 0", b"photo 1", b"photo 2"]


def test_the_example_runs_and_is_what_the_pages_show(tmp_path: Path) -> None:
    if not PYTHON.exists():
        missing = "tritonclient is not there; scripts/tritonclient fetches it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    paths = [tmp_path / f"{i}.jpg" for i in range(len(PHOTOS))]
    for path, photo in zip(paths, PHOTOS, strict=True):
        path.write_bytes(photo)
    example = ROOT / "examples" / "triton.py"
    with serving(FakeEncoder(), GalleryDirectory(tmp_path / "galleries")) as running:
        line = [*map(str, (PYTHON, "-I", example, running.address, *paths))]
        done = subprocess.run(line, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stderr
    found = np.loadtxt(done.stdout.splitlines(), np.float32)
    np.testing.assert_allclose(found, expected(*PHOTOS), atol=1e-6)
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert "tritonclient" not in block or block in example.read_text(), page
