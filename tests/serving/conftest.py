"""A server with a fake encoder and a folder of galleries, and its stubs; a model file and pictures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.gallery.directory import GalleryDirectory
from serving.server.server import Server
from tests.serving.indexed import fill
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs, connected
from tests.tiny_model import write_tiny_model


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
def running(encoder: FakeEncoder, tmp_path: Path) -> Iterator[Server]:
    with serving(encoder, GalleryDirectory(tmp_path)) as running:
        yield running


@pytest.fixture
def stubs(running: Server) -> Iterator[Stubs]:
    with connected(running.address) as stubs:
        yield stubs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file of a few nodes."""
    return write_tiny_model(tmp_path / "model.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of 20 pictures of 4 classes."""
    return fill(tmp_path / "data")
