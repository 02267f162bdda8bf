"""What the tests of training share: a drawn folder, a small recipe, a run of both."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.small import SMALL, Train, draw_folder
from training.train import Settings, run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("data"), classes=6, images=4, size=18)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Nine images to change."""
    return draw_folder(tmp_path / "data", classes=3, images=3, size=20)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    (file := tmp_path_factory.mktemp("recipe") / "small.yaml").write_text(SMALL)
    return str(file)


@pytest.fixture(scope="module")
def train(data: Path, recipe: str) -> Train:
    def train(out: Path, *changes: str, **more: Any) -> dict[str, Any]:
        given = {"recipe": recipe, "data": data, "out": out, "set": list(changes)}
        return run(Settings.model_validate(given | more))

    return train


@pytest.fixture(scope="session")
def whole(data: Path, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "whole"
    run(Settings(recipe=recipe, data=data, out=out))
    return out
