"""Unit vectors, galleries of them, and what other programs do to those."""

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.gallery.gallery import Gallery, RebuildPolicy

MANUAL = RebuildPolicy(automatic=False)
MODEL: dict[str, Any] = {"model_name": "m", "fingerprint": "f" * 64, "dimension": 4}
AXES = np.eye(4, dtype=np.float32)
# Where files are held in memory, if there is such a place: to sync a disk takes most of a write's time.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def units(count: int, dimension: int = 16, seed: int = 0) -> NDArray[np.float32]:
    """Vectors in every direction, float32 (n, d)."""
    return normalized(np.random.default_rng(seed).standard_normal((count, dimension)))


def clustered(count: int, dimension: int) -> NDArray[np.float32]:
    """Vectors about 60 centres, float32 (n, d)."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, dimension))
    return normalized(centres[rng.integers(60, size=count)] + 0.5 * rng.standard_normal((count, dimension)))


def normalized(rows: NDArray[Any]) -> NDArray[np.float32]:
    units: NDArray[np.float32] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return units


def created(path: Path, dimension: int = 4, *, policy: RebuildPolicy = MANUAL, **more: Any) -> Gallery:
    """Make a gallery; by itself it does not make its index anew, unless the policy is another."""
    return Gallery.create(path, **{**MODEL, "dimension": dimension, **more}, policy=policy)


def sql(path: Path, *statements: str, **values: Any) -> None:
    """Have another program change a gallery's file, or the one in its folder."""
    file = path / "gallery.sqlite" if path.is_dir() else path
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement, values)


def flip(file: Path, offset: int) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def aged(folder: Path, seconds: float) -> Path:
    """Make a folder with a file in it, as if that had been so long ago."""
    folder.mkdir()
    for path in (folder / "gallery.sqlite", folder):
        path.touch()
        os.utime(path, (time.time() - seconds,) * 2)
    return folder


def open_files(folder: Path) -> int:
    """Return how many files in a folder this process has open."""
    files = Path("/proc/self/fd")
    if not files.is_dir():
        pytest.skip("no /proc here")
    return sum(os.path.realpath(file).startswith(f"{folder.resolve()}/") for file in files.iterdir())
