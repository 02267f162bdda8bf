"""A run that was cut and resumed equals one that was not, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import training.train
from serving.errors import AlreadyExists, BadArtifact, BadData, BadSetting, ModelMismatch, NotFound
from tests.training.small import Train, cut_at, draw_folder, equal_runs
from training.loop.checkpoint import load_checkpoint, save_checkpoint
from training.loop.run import load_run, reserved
from training.loop.trainee import start_trainee
from training.train import Settings, render, run

OPTIONS = {
    "plain": "",
    "memory, recursion and mixing": "loss=multi_similarity memory_batches=2 mixing=all xml_warmup=0.5"
    " xml_prototypes=recursion",
    "proxies and drops": "loss=proxy_anchor schedule=drops drop_epochs=[1] freeze_epochs=1 clip_value=0.1"
    " optimizer=adam",
    "messages and fp16": "loss=libc precision=16-mixed optimizer=radam image_size=8",
    "rmsprop, erasing": "optimizer=rmsprop erasing=0.5 pooling=gap freeze_batchnorm_weights=true",
}


def test_resuming_a_finished_run_changes_nothing(whole: Path, recipe: str) -> None:
    before = (whole / "last.safetensors").read_bytes()
    result = run(Settings(recipe=recipe, out=whole, resume=True))
    assert (whole / "last.safetensors").read_bytes() == before
    assert "MAP@R" in render(result)


def test_a_run_is_resumed_as_it_was_started(whole: Path, recipe: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="dimension = 8, but now 9"):
        run(Settings(recipe=recipe, out=whole, set=["dimension=9"], resume=True))
    with pytest.raises(BadSetting, match="--set"):
        run(Settings(out=whole, set=["dimension=9"], resume=True))
    other = draw_folder(tmp_path / "other", classes=6, images=3)
    with pytest.raises(BadData, match="other images"):
        run(Settings(data=other, out=whole, resume=True))


def test_an_untrained_network_is_told(train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "r"
    with cut_at(0):
        train(out)
    with pytest.raises(NotFound, match=r"no trained weights.*crossbatch train --resume --out"):
        load_run(out)
    with cut_at(3):
        run(Settings(out=out, resume=True))
    load_run(out)
    assert "has ended 1 of its 3 epochs" in caplog.text


def test_a_damaged_or_foreign_checkpoint_is_told(train: Train, tmp_path: Path) -> None:
    out = tmp_path / "r"
    train(out, "epochs=1")
    tensors, state = load_checkpoint(out / "last.safetensors")
    save_checkpoint(out / "last.safetensors", tensors, {"epochs_done": 1, "history": []})
    with pytest.raises(BadArtifact, match=r"last\.safetensors is damaged.*no best"):
        run(Settings(out=out, resume=True))
    del tensors["model.codebook"]
    save_checkpoint(out / "last.safetensors", tensors, state)
    with pytest.raises(ModelMismatch, match="codebook"):
        run(Settings(out=out, resume=True))
    tensors, state = load_checkpoint(out / "best.safetensors")
    save_checkpoint(out / "best.safetensors", tensors, {"epoch": None})
    with pytest.raises(BadArtifact, match=r"best\.safetensors is damaged.*no epoch"):
        load_run(out)
    text = (out / "recipe.yaml").read_text()
    shortened, edited = text[: len(text) // 2].rpartition("\n")[0], text.replace("epochs: 1", "epochs: 2")
    for changed in (shortened, edited, "a word", "["):
        (out / "recipe.yaml").write_text(changed)
        told = "not readable YAML" if changed == "[" else "was edited"
        with pytest.raises(BadArtifact, match=rf"recipe\.yaml is damaged.* {told}"):
            load_run(out)


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_a_run_remembers_it_resumes_bit_for_bit(train: Train, name: str, tmp_path: Path) -> None:
    more = OPTIONS[name].split()
    train(tmp_path / "whole", *more)
    torch.manual_seed(99)  # whatever was drawn before
    with cut_at(0 if name == "plain" else 4):  # in the first epoch, or at the start of the third
        train(tmp_path / "cut", *more)
    torch.manual_seed(1234)
    result = run(Settings(out=tmp_path / "cut", resume=True))
    equal_runs(tmp_path / "whole", tmp_path / "cut")
    assert result["best"]["epoch"] == load_run(tmp_path / "cut").record["metrics"]["epoch"]


def test_one_process_trains_in_a_folder_at_a_time(train: Train, whole: Path, tmp_path: Path) -> None:
    with reserved(tmp_path / "r"), pytest.raises(AlreadyExists, match="another process trains in"):
        train(tmp_path / "r")
    with reserved(whole), pytest.raises(AlreadyExists, match="another process trains in"):
        run(Settings(out=whole, resume=True))


def test_a_run_made_meanwhile_is_left(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    inner = start_trainee

    def start(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        train(out, "seed=5")
        return inner(*arguments, **options)

    monkeypatch.setattr(training.train, "start_trainee", start)
    with pytest.raises(AlreadyExists, match="holds a run already"):
        train(out)
    assert load_run(out).recipe.seed == 5


def test_a_resume_on_images_that_cannot_be_read_any_more_is_refused(train: Train, tmp_path: Path) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=4, size=18)
    with cut_at(3):
        train(tmp_path / "r", data=data)
    (data / "class02" / "1.png").write_text("no image")
    with pytest.raises(BadData, match=r"1 images .* cannot be read \(first: class02/1\.png.*but 0 could not"):
        run(Settings(out=tmp_path / "r", resume=True))


def test_weights_that_are_gone_or_were_never_trained_are_told(train: Train, tmp_path: Path) -> None:
    out = tmp_path / "r"
    train(out, "epochs=1", "validation=0")
    tensors, state = load_checkpoint(out / "best.safetensors")
    (out / "last.safetensors").rename(tmp_path / "last")
    save_checkpoint(out / "best.safetensors", tensors, state | {"epoch": 0})
    with pytest.raises(NotFound, match="no trained weights"):
        load_run(out)
    (tmp_path / "last").rename(out / "last.safetensors")
    (out / "best.safetensors").unlink()
    with pytest.raises(BadArtifact, match=r"lost best\.safetensors"):
        load_run(out)
