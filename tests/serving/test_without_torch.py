"""The server as a process in which torch cannot be imported."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from serving.client.client import Client
from serving.model.encoder import Encoder
from tests.pictures import encoded
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import crossbatch
sys.exit(crossbatch.main())
"""


def test_the_server_embeds_with_torch_blocked(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.onnx")
    photo = encoded(np.random.default_rng(5).integers(0, 256, (9, 9, 3), np.uint8), "PNG")
    encoder = Encoder(model)
    expected = encoder.encode(encoder.preprocess(photo)[None])
    words = ["serve", "--model", str(model), "--galleries", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"serving on (127\.0\.0\.1:\d+)\n", process.stdout.readline())
            assert found
            with Client(found[1]) as client:
                np.testing.assert_allclose(client.embed([photo]), expected, atol=1e-6)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=15)
            assert process.returncode == 0, err
        finally:
            process.kill()
