"""Pictures for the benchmarks that send them."""

from pathlib import Path

import numpy as np

from tests.pictures import encoded

__all__ = ["write_jpegs"]


def write_jpegs(folder: Path, count: int = 4) -> Path:
    """Write JPEGs of noise, each of another; returns the folder."""
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 30, 3), dtype=np.uint8)
        (folder / f"{number}.jpg").write_bytes(encoded(pixels, "JPEG"))
    return folder
