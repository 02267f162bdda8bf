"""A folder in memory, a server with a fake encoder and a folder of galleries, and its stubs."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.gallery.directory import GalleryDirectory
from serving.server.server import Server
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs, connected


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty folder, in memory where there is such a place: to sync a disk takes most of a write's time."""
    place = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as name:
        yield Path(name)


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
