"""The training command: what it leaves behind, and what cannot be trained is told."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import training.data.pictures
import training.train
from serving.errors import AlreadyExists, BadData, BadSetting, NotFound
from tests.training.small import Train, draw_folder, read_table
from training.data.partition import read_own
from training.loop import checkpoint
from training.loop.run import load_run
from training.recipes.recipe_file import recipe_names
from training.train import Settings, render, run


def test_a_run_folder_tells_all(whole: Path, data: Path) -> None:
    assert {file.name for file in whole.iterdir()} == {
        "recipe.yaml", "record.json", "metrics.csv", "best.safetensors", "last.safetensors",
    }  # fmt: skip
    record, rows = json.loads((whole / "record.json").read_text()), read_table(whole / "metrics.csv")
    assert (record["name"], record["seed"], "git_commit" in record) == ("small", 0, True)
    assert torch.__version__.startswith(record["versions"]["torch"])
    found = [record["data"][name] for name in ("root", "train_classes", "validation_classes")]
    assert found == [str(data), ["class00", "class02", "class04"], ["class01", "class03"]]
    assert 0 <= record["metrics"]["validation"]["map_at_r"] <= 1
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert all(float(row["loss"]) > 0 and float(row["xml"]) > 0 for row in rows[1:])
    assert max(float(row["map_at_r"]) for row in rows) == record["metrics"]["validation"]["map_at_r"]
    trained = load_run(whole)
    assert not trained.embedder.training
    assert trained.epoch == record["metrics"]["epoch"]


def test_an_existing_folder_is_refused(train: Train, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(AlreadyExists, match="--resume"):
        train(whole)
    for name in ("thesis.tex", "record.json"):  # of someone else
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text('{"artist": "Nico"}')
        with pytest.raises(AlreadyExists, match="not empty"):
            train(tmp_path / name)
        assert (tmp_path / name / name).read_text() == '{"artist": "Nico"}'
    with pytest.raises(BadSetting, match="is a file"):
        train(tmp_path / "thesis.tex" / "thesis.tex")
    with pytest.raises(NotFound, match="not a run folder"):
        train(tmp_path / "none", resume=True)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"set": ["weights=/nonexistent.safetensors"]}, NotFound, "nonexistent"),
        ({"set": ["backbone=nothing"]}, BadSetting, "no backbone"),
        ({"set": ["loss=nope"]}, BadSetting, "no loss"),
        ({"set": ["freeze_stages=99"]}, BadSetting, "freeze_stages"),
        ({"device": "cuda"}, BadSetting, "--device cuda"),
        ({"set": ["made_for=cub"]}, BadData, r"small\.yaml is for the data set cub, .* was read as folder"),
    ],
)
def test_a_setting_that_fails_leaves_no_folder_and_is_told_before_an_image_is_read(
    settings: dict[str, Any], error: type[Exception], told: str, train: Train, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training.data.pictures, "Pictures", lambda *_, **__: pytest.fail("an image was read"))
    with pytest.raises(error, match=told):
        train(tmp_path / "r", *settings.pop("set", ()), **settings)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["record.json", "recipe.yaml"])
def test_a_cut_start_is_free(
    train: Train, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    inner = checkpoint.write_file

    def cut(path: Path, contents: bytes) -> None:
        if path.name == name:
            (path.parent / f".{name}.tmp").write_bytes(contents[:10])  # as kill -9 leaves it
            raise KeyboardInterrupt
        inner(path, contents)

    monkeypatch.setattr(checkpoint, "write_file", cut)
    with pytest.raises(KeyboardInterrupt):
        train(out)
    monkeypatch.undo()
    more = "" if name == "record.json" else ".*cut.*without"
    with pytest.raises(NotFound, match=f"not a run folder{more}"):
        run(Settings(out=out, resume=True))
    train(out, "epochs=1")
    assert load_run(out).recipe.epochs == 1
    assert not list(out.glob(".*"))


def test_what_is_missing_or_no_utf8_is_told(data: Path, recipe: str, tmp_path: Path) -> None:
    odd, asked = tmp_path / "p\udcff", Settings(recipe=recipe, data=data, out=tmp_path / "r")
    for name, value, told in (
        ("data", odd, "--data is '.*udcff.*not UTF-8"),
        ("out", odd / "r", "--out is '.*udcff.*not UTF-8"),
        ("table", odd / "t.csv", "--table is '.*udcff.*not UTF-8"),
        ("recipe", str(odd / "r.yaml"), "the recipe is '.*udcff.*not UTF-8"),
        ("out", None, "--out"),
        ("data", None, "--data"),
        ("recipe", None, "needs a recipe"),
        ("data", tmp_path / "nowhere", "nowhere"),
    ):
        with pytest.raises((BadSetting, BadData), match=told):
            run(asked.model_copy(update={name: value}))
    assert not (tmp_path / "r").exists()


def test_list_shows_every_recipe_by_its_first_line_and_one_by_its_whole_head() -> None:
    result = run(Settings(list=True))
    assert [recipe["name"] for recipe in result["recipes"]] == recipe_names()
    told = render(result)
    assert "cub100-contrastive-xml" in told
    assert len(told.splitlines()) == len(recipe_names()) + 2
    one = run(Settings(list=True, recipe="cub100-contrastive-xml"))
    assert "crossbatch train cub100-contrastive-xml --data" in render(one)


def test_bad_images_are_skipped_and_listed_and_those_of_the_test_never_opened(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=3)
    (data / "class01" / "text.jpg").write_text("no image")
    (data / "class05" / "test.jpg").write_text("no image")  # the one class that tests
    result = train(tmp_path / "r", "epochs=1", data=data)
    assert [bad["key"] for bad in result["unreadable"]] == ["class01/text.jpg"]
    assert "skipped class01/text.jpg" in render(result)
    assert "text.jpg" not in caplog.text  # once is enough
    assert "1 images cannot be read and are left out" in caplog.text
    assert load_run(tmp_path / "r").record["data"]["unreadable"] == ["class01/text.jpg"]
    for bad, told in (
        ("class0[13]", r"none of the 2 validation classes has two images.*7 images cannot \(first"),
        ("class00", "'class00'"),
    ):
        for file in data.glob(f"{bad}/*"):
            file.write_text("no image")
        with pytest.raises(BadData, match=told):
            train(tmp_path / "s", data=data)
        assert not (tmp_path / "s").exists()


def test_what_is_left_out_is_told_and_stays_out_of_the_run(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = draw_folder(tmp_path / "data", classes=8, images=3)
    (data / "class00" / "1.cr2").write_text("")
    (data / "class07").rename(data / "#recycle")
    train(tmp_path / "r", "epochs=1", data=data, exclude=["class06"])
    assert f"of {data}: passed over: 1 .cr2" in caplog.text
    assert f"of {data}: left out: 1 by --exclude, 1 #recycle" in caplog.text
    own = read_own(load_run(tmp_path / "r").record)
    assert {row.label for row in own.rows} == {f"class0{i}" for i in range(6)}


def test_the_end_tells_what_trained(train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = render(train(tmp_path / "r", "epochs=1", "min_delta=0.99"))
    assert "12 images of 3 classes trained, and 8 chose the epoch; the data set was read as folder." in told
    assert "Trained 1 epoch in" in told
    assert "No epoch did better than the start on validation: these weights are untrained." in told
    again = render(run(Settings(out=tmp_path / "r", resume=True)))
    assert "The run was finished already" in again
    load_run(tmp_path / "r")
    assert "untrained: on validation, no epoch did better than the start" in caplog.text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], "12 images of 3 classes train, 8 images of 2 classes validate; the first: {0}, {2}, {4}\n"),
        (["validation=0"], "20 images of 5 classes train; the first: {0}, {1}, {2}, ...\n"),
    ],
)
def test_what_trains_is_told_before_the_first_image_is_read(
    changes: list[str], told: str, train: Train, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(training.train, "read_pictures", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "r", *changes)
    classes = [f"'class{number:02}'" for number in range(5)]
    assert capsys.readouterr() == ("", f"{data} was read as folder: {told.format(*classes)}")
