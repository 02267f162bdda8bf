"""Every recipe of ours: two steps on made-up images, and a head that tells what a reader needs."""

import re
from pathlib import Path

import pytest

from tests.training.drawn import draw_folder
from training.checkpoint import load_checkpoint
from training.recipe_file import head_comment, load_recipe, recipe_names
from training.train import Settings, run


@pytest.mark.parametrize("name", recipe_names())
def test_two_steps(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    data = tmp_path / "data"
    if recipe.split_by == "given":
        draw_folder(data, classes=3, images=4, below="train")
        draw_folder(data, classes=3, images=1, below="test")
    elif recipe.split_by == "folder":
        for alphabet in range(8):
            draw_folder(data, classes=2, images=2, below=f"alphabet{alphabet}")
    else:
        draw_folder(data, classes=8, images=4)
    small = ["classes_per_batch=2", "images_per_class=2", "batches_per_epoch=2", "epochs=1", "image_size=32"]
    if recipe.weights != "none":
        small += ["dimension=8"]
    run(Settings(recipe=name, data=data, out=tmp_path / "run", set=[*small, "workers=0", "threads=1"]))
    _, state = load_checkpoint(tmp_path / "run" / "last.safetensors")
    assert state["history"][-1]["steps"] == 2


UNMEASURED = {"cifar10-contrastive-xml"}
"""Recipes whose figures may still be missing, if the head says so."""


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_states_paper_command_hardware_time_and_score(name: str) -> None:
    lines = head_comment(name).splitlines()
    told = {key: rest.strip() for key, colon, rest in (line.partition(":") for line in lines) if colon}
    assert told.get("Paper") or "no paper" in head_comment(name).lower()
    assert told["Command"].startswith(
        "crossbatch demo" if name == "demo" else f"crossbatch train {name} --data"
    )
    assert told["Hardware"]
    for word, figure in (("Time", r"\d"), ("Score", r"\d\.\d")):
        if name in UNMEASURED and told[word].startswith("not measured yet"):
            continue
        assert re.search(figure, told[word]), f"{word}: {told[word]}"
        assert "not measured" not in told[word]
