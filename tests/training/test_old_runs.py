"""A run of an earlier version still opens: its recipe and its weights have other names."""

import json
import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from training.loop.checkpoint import load_checkpoint
from training.loop.run import load_run


def test_a_run_of_version_1_opens_with_the_same_weights(whole: Path, tmp_path: Path) -> None:
    old = shutil.copytree(whole, tmp_path / "old")
    settings = yaml.safe_load((old / "recipe.yaml").read_text())
    del settings["assign_on"]
    settings |= {"unit": False, "epsilon": settings.pop("assignment_scale")}
    (old / "recipe.yaml").write_text(yaml.safe_dump(settings))
    record = json.loads((old / "record.json").read_text())
    del record["recipe_digest"]
    (old / "record.json").write_text(json.dumps(record))
    tensors, state = load_checkpoint(old / "best.safetensors")
    tensors["model.prototypes"] = tensors.pop("model.codebook")
    save_file(
        tensors, old / "best.safetensors", metadata={"crossbatch": json.dumps(state | {"format_version": 1})}
    )
    opened, new = load_run(old), load_run(whole)
    assert (opened.recipe.assign_on, opened.recipe.assignment_scale) == ("raw", new.recipe.assignment_scale)
    assert torch.equal(opened.embedder.codebook, new.embedder.codebook)
