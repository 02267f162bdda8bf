"""The MLRC command: a run for each fold and repeat, taken up where it was cut, and their ensembles."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import training.train
from serving.catalog.catalog import Row, read, select
from serving.errors import BadData, BadSetting
from tests import oracles
from tests.oracles import Floats
from tests.training.small import cut_at, draw_folder
from training.data.pictures import Stream, viewing_decoder
from training.evaluation.mlrc import Settings, render, run
from training.loop.run import Run, load_run, read_record
from training.network.embedder import embedder_function
from training.train import Settings as Train
from training.train import run as train

SMALL = """
{image_size: 16, dimension: 6, prototypes: 4, classes_per_batch: 2, images_per_class: 2, epochs: 1,
batches_per_epoch: 2, split_train: 6, folds: 3, seed: 5, threads: 1}
"""
Trained = list[tuple[str, bool]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = draw_folder(tmp_path_factory.mktemp("data"), classes=9, images=3, size=18)
    for image in ("1.png", "2.png"):
        (root / "class08" / image).unlink()
    return root


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    (file := tmp_path_factory.mktemp("recipe") / "small.yaml").write_text(SMALL)
    return str(file)


@pytest.fixture(scope="module")
def out(data: Path, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two repeats."""
    folder = tmp_path_factory.mktemp("mlrc") / "out"
    run(Settings(recipe=recipe, data=data, out=folder, repeats=2))
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Which runs the command trains, and whether it resumes them."""
    trained: Trained = []

    def counted(settings: Any) -> dict[str, Any]:
        trained.append((f"{settings.out.parent.name}/{settings.out.name}", settings.resume))
        return train(settings)

    monkeypatch.setattr(training.train, "run", counted)
    return trained


def _embed(trained: Run, rows: tuple[Row, ...]) -> Floats:
    pixels = np.stack(list(Stream(rows, viewing_decoder(trained.recipe))))
    return embedder_function(trained.embedder)(pixels).astype(np.float64)


def test_each_fold_of_each_repeat_is_an_ordinary_run(out: Path) -> None:
    for number, (repeat, fold) in enumerate(itertools.product(range(2), range(3))):
        record = read_record(out / f"repeat{repeat}" / f"fold{fold}")
        assert (record["seed"], record["data"]["folds"], record["data"]["fold"]) == (5 + number, 3, fold)
        assert record["data"]["validation_classes"] == [f"class0{2 * fold}", f"class0{2 * fold + 1}"]


def test_figures_are_those_of_naive_ensembles(out: Path, data: Path) -> None:
    result = json.loads((out / "mlrc.json").read_text())
    rows = select(read(data), "test", load_run(out / "repeat0" / "fold0").recipe.split)
    labels = np.array([int(row.label[-2:]) for row in rows])
    for repeat in range(2):
        parts = [_embed(load_run(out / f"repeat{repeat}" / f"fold{fold}"), rows) for fold in range(3)]
        whole = np.concatenate([part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts], axis=1)
        told = result["repeats"][repeat]
        for fold, part in enumerate(parts):
            recall, average, precision, excluded = oracles.retrieval(part, labels, (1,))
            assert told["by_fold"][fold] == pytest.approx(
                {"recall_at_1": recall[1], "map_at_r": average, "r_precision": precision}
            )
            assert told["excluded"] == excluded == 1
        assert told["concatenated"]["map_at_r"] == pytest.approx(oracles.retrieval(whole, labels, (1,))[1])
    assert result["dimension"] == {"separate": 6, "concatenated": 18}
    assert (result["images"], result["classes"], result["queries"]) == (7, 3, 6)
    both = [told["separate"]["map_at_r"] for told in result["repeats"]]
    assert result["separate"]["map_at_r"]["mean"] == pytest.approx(sum(both) / 2)
    half = result["separate"]["map_at_r"]["half_width"]
    assert half == pytest.approx(12.706 * abs(both[0] - both[1]) / 2, rel=1e-3)
    text = render(result)
    told = ("separate, 6-D", "concatenated, 18-D", "2 repeats", "over the repeats", "1 images have no match")
    for words in (f"{50 * sum(both):.2f} ± {100 * half:.2f}", *told):
        assert words in text


def test_a_second_call_goes_on(out: Path, data: Path, recipe: str, tmp_path: Path, trained: Trained) -> None:
    copy = shutil.copytree(out, tmp_path / "out")
    for fold in ("fold1", "fold2"):
        shutil.rmtree(copy / "repeat0" / fold)
    before = json.loads((copy / "mlrc.json").read_text())
    alone = Train(recipe=recipe, data=data, out=copy / "repeat0" / "fold2", set=["fold=2", "seed=7"])
    train(alone)  # by itself, which is then taken
    after = run(Settings(recipe=recipe, data=data, out=copy, repeats=2))
    assert (trained, after["repeats"]) == ([("repeat0/fold1", False)], before["repeats"])
    one = run(Settings(recipe=recipe, data=data, out=copy))
    assert (len(trained), one["repeats"]) == (1, before["repeats"][:1])
    assert one["separate"]["map_at_r"]["half_width"] is None
    assert "±" not in render(one)
    assert "one repeat gives no confidence interval" in render(one)


def test_a_cut_fold_goes_on(out: Path, data: Path, recipe: str, tmp_path: Path, trained: Trained) -> None:
    first = tmp_path / "out" / "repeat0" / "fold0"
    train(Train(recipe=recipe, data=data, out=first, set=["fold=0", "seed=5"]))
    with cut_at(0):  # the first step of the second fold
        run(Settings(recipe=recipe, data=data, out=tmp_path / "out"))
    trained.clear()
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "out"))
    assert trained == [("repeat0/fold1", True), ("repeat0/fold2", False)]
    assert result["repeats"] == json.loads((out / "mlrc.json").read_text())["repeats"][:1]


def test_other_recipes_and_other_images_are_refused(
    out: Path, data: Path, recipe: str, tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = draw_folder(tmp_path / "other", classes=9, images=2)
    asked = Settings(recipe=recipe, data=data, out=out)
    for changes, error, told in (
        ({"set": ["epochs=2"]}, BadSetting, "fold0 was trained with epochs = 1, but now 2 is asked for"),
        ({"data": other}, BadData, "fold0 was trained on other images"),
        ({"recipe": "demo", "out": tmp_path / "out"}, BadSetting, r"sets folds to 0.*folds=4"),
        ({"set": ["folds=7"], "out": tmp_path / "out"}, BadData, "6 classes to train on, of which 7 folds"),
    ):
        with pytest.raises(error, match=told):
            run(asked.model_copy(update=changes))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    with pytest.raises(BadSetting, match=r"one process.*fold=F"):
        run(asked)
    assert trained == []


def test_queries_are_searched_in_the_gallery_alone(data: Path, recipe: str, tmp_path: Path) -> None:
    table = shutil.copytree(data, tmp_path / "data") / "table.csv"
    images = [(number, image) for number in range(9) for image in range(3 if number < 8 else 1)]
    unseen = ("query", "gallery", "gallery")
    lines = [f"class{c:02d}/{i}.png,c{c},{'train' if c < 6 else unseen[i]}" for c, i in images]
    table.write_text("\n".join(["path,label,split", *lines, ""]))
    result = run(Settings(recipe=recipe, data=table, out=tmp_path / "out", set=["split_by=given"]))
    assert (result["queries"], result["excluded"], result["gallery"]) == (2, 1, 4)
    assert "2 queries were searched in a gallery of 4 images" in render(result)
