"""Folders in memory, a server with a fake encoder and galleries, and its stubs; a model file and pictures."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.gallery.directory import GalleryDirectory
from serving.gallery.place import galleries_at
from serving.server.server import Server
from tests.serving.indexed import fill
from tests.serving.milvus_server import TOKEN, MilvusServer, milvus_lite, milvus_server
from tests.serving.rpc_fakes import FakeEncoder, serving
from tests.serving.stubs import Stubs, connected
from tests.serving.vectors import MEMORY
from tests.tiny_model import write_tiny_model


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty folder in which writing is quick."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def milvus() -> Iterator[MilvusServer]:
    """A Milvus server, whose credentials are in the environment from now on."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as name,  # half a gigabyte, which pytest would keep
        milvus_server(Path(name) / "milvus") as server,
    ):
        patch.setenv("CROSSBATCH_MILVUS_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="session")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a milvus-lite."""
    with milvus_lite(tmp_path_factory.mktemp("lite")) as address:
        yield address


@pytest.fixture
def place(lite: str) -> str:
    """The address of a milvus-lite that holds no gallery."""
    with galleries_at(lite) as galleries:
        for name in galleries.names():
            galleries.drop(name)
    return lite


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # pytest cannot clean up a mounted folder of its own
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        folder.rmdir()
        pytest.skip("no right to mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


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
