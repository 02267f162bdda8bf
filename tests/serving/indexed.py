"""A small data set, and the index command on it, for the tests of indexing."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from serving.gallery.gallery import Gallery
from serving.indexing.command import Settings, run
from tests.pictures import encoded
from tests.serving.vectors import MANUAL


def picture(seed: int, kind: str = "JPEG") -> bytes:
    return encoded(np.random.default_rng(seed).integers(0, 256, (24, 20, 3), np.uint8), kind)


def fill(root: Path) -> Path:
    """Write 20 pictures of 4 classes: class{n % 4}/{n:02}.jpg."""
    for seed in range(20):
        folder = root / f"class{seed % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{seed:02}.jpg").write_bytes(picture(seed))
    return root


def index(model: Path, data: Path, gallery: Path | str, **more: Any) -> dict[str, Any]:
    given = {"gallery": str(gallery), "model": model, "data": data, "batch": 3, "threads": 2}
    return run(Settings.model_validate(given | more))


def counts(result: dict[str, Any]) -> dict[str, int]:
    """What a run did, without what it did not."""
    names = ("stored", "updated", "unchanged", "changed", "kept", "gone", "deleted")
    told = {name: result[name] for name in names} | {"skipped": len(result["skipped"])}
    return {name: count for name, count in told.items() if count}


@contextmanager
def opened(path: Path) -> Iterator[Gallery]:
    with closing(Gallery.open(path, policy=MANUAL)) as gallery:
        yield gallery
