"""Every recipe of ours: two steps on made-up images, and a head that tells what a reader needs."""

from pathlib import Path

import pytest

from tests.training.drawn import draw_folder
from training.checkpoint import load_checkpoint
from training.recipe import head_comment, load_recipe, recipe_names
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


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_states_command_hardware_time_and_score(name: str) -> None:
    head = head_comment(name)
    for word in ("Command:", "Hardware:", "Time:", "Score:"):
        assert any(line.startswith(word) for line in head.splitlines()), word
    if name != "demo":  # which is our own
        assert "Paper:" in head
        assert f"crossbatch train {name} --data" in head
