"""The training command: a run cut and resumed equals one that was not; what cannot be trained is told."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import training.fit
import training.objective
import training.run
import training.train
from serving.errors import AlreadyExists, BadArtifact, BadData, BadSetting, ModelMismatch, NotFound
from tests.training.drawn import draw_folder
from training.checkpoint import load_checkpoint, save_checkpoint, write_file
from training.embedder import build_embedder
from training.optimizer import average_weights, build_optimizer, freeze_batchnorm
from training.pictures import Pictures
from training.recipe import Recipe
from training.recipe_file import recipe_names
from training.run import load_run
from training.train import Settings, render, run

SMALL = """
image_size: 16
dimension: 8
prototypes: 4
classes_per_batch: 3
images_per_class: 2
epochs: 3
split_train: 5
validation: 0.4
ema_decay: 0.9
crop_scale: 0.5
flip: 0.5
clip_norm: 5
threads: 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("data"), classes=6, images=4, size=18)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("recipe") / "small.yaml"
    file.write_text(SMALL)
    return str(file)


@pytest.fixture(scope="module")
def whole(data: Path, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "whole"
    run(Settings(recipe=recipe, data=data, out=out))
    return out


def _cut_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object, **told: int) -> None:
        if told["step"] == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.fit, "_check_finite", check)


def _equal(first: Path, second: Path) -> None:
    for name in ("best.safetensors", "last.safetensors"):
        (ours, state), (theirs, told) = load_checkpoint(first / name), load_checkpoint(second / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
        for row in (*state.get("history", ()), *told.get("history", ())):
            row.pop("seconds", None)  # of the wall clock
        assert state == told


def test_a_run_folder_tells_all(whole: Path, data: Path) -> None:
    assert {file.name for file in whole.iterdir()} == {
        "recipe.yaml", "record.json", "metrics.csv", "best.safetensors", "last.safetensors",
    }  # fmt: skip
    record = json.loads((whole / "record.json").read_text())
    assert record["name"] == "small"
    assert record["seed"] == 0
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert "git_commit" in record
    assert record["data"]["root"] == str(data)
    assert record["data"]["train_classes"] == ["class00", "class02", "class04"]
    assert record["data"]["validation_classes"] == ["class01", "class03"]
    assert 0 <= record["metrics"]["validation"]["map_at_r"] <= 1
    with (whole / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert all(float(row["loss"]) > 0 and float(row["xml"]) > 0 for row in rows[1:])
    assert max(float(row["map_at_r"]) for row in rows) == record["metrics"]["validation"]["map_at_r"]


def test_the_best_weights_are_those_of_the_best_epoch(whole: Path) -> None:
    trained = load_run(whole)
    assert trained.recipe.dimension == 8
    assert not trained.embedder.training
    tensors, best = load_checkpoint(whole / "best.safetensors")
    assert torch.equal(trained.embedder.prototypes, tensors["model.prototypes"])
    assert best["epoch"] == trained.record["metrics"]["epoch"]


def test_the_same_seed_gives_the_same_run(whole: Path, data: Path, recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever was drawn before
    run(Settings(recipe=recipe, data=data, out=tmp_path / "again"))
    _equal(whole, tmp_path / "again")


@pytest.mark.parametrize(
    "step", [0, 3, 5]
)  # in the first epoch, at the start of the second, inside the third
def test_a_cut_run_resumed_equals_an_uncut_one(
    step: int, whole: Path, data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cut"
    _cut_at(step, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(Settings(recipe=recipe, data=data, out=out))
    monkeypatch.undo()
    torch.manual_seed(1234)
    result = run(Settings(out=out, resume=True))
    _equal(whole, out)
    assert result["best"]["epoch"] == load_run(out).record["metrics"]["epoch"]


def test_resuming_a_finished_run_changes_nothing(whole: Path, recipe: str) -> None:
    before = (whole / "last.safetensors").read_bytes()
    result = run(Settings(recipe=recipe, out=whole, resume=True))
    assert (whole / "last.safetensors").read_bytes() == before
    assert "MAP@R" in render(result)


def test_an_existing_folder_is_refused(whole: Path, data: Path, recipe: str, tmp_path: Path) -> None:
    with pytest.raises(AlreadyExists, match="--resume"):
        run(Settings(recipe=recipe, data=data, out=whole))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(AlreadyExists, match="not empty"):
        run(Settings(recipe=recipe, data=data, out=tmp_path))
    with pytest.raises(BadSetting, match="is a file"):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "thesis.tex"))
    with pytest.raises(NotFound, match="not a run folder"):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "none", resume=True))


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"set": ["weights=/nonexistent.safetensors"]}, NotFound, "nonexistent"),
        ({"set": ["backbone=nothing"]}, BadSetting, "no backbone"),
        ({"set": ["loss=nope"]}, BadSetting, "no loss"),
        ({"set": ["freeze_stages=99"]}, BadSetting, "freeze_stages"),
        ({"set": ["head_init=pca", "dimension=512"]}, BadSetting, "head_init"),
        ({"device": "cuda"}, BadSetting, "--device cuda"),
    ],
)
def test_a_setting_that_fails_leaves_no_folder(
    settings: dict[str, Any], error: type[Exception], told: str, data: Path, recipe: str, tmp_path: Path
) -> None:
    if "device" in settings and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(error, match=told):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "r", **settings))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", ["record.json", "recipe.yaml"])
@pytest.mark.parametrize("at", ["write", "replace"])
def test_a_start_that_was_cut_is_vacant(
    name: str, at: str, data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    inner = write_file

    def cut(path: Path, contents: bytes) -> None:
        if path.name == name:
            if at == "replace":  # as kill -9 leaves it
                (path.parent / f".{name}.tmp").write_bytes(contents[:10])
            raise KeyboardInterrupt
        inner(path, contents)

    monkeypatch.setattr(training.run, "write_file", cut)
    with pytest.raises(KeyboardInterrupt):
        run(Settings(recipe=recipe, data=data, out=out))
    monkeypatch.undo()
    with pytest.raises(
        NotFound, match="not a run folder" + ("" if name == "record.json" else ".*cut.*without")
    ):
        run(Settings(out=out, resume=True))
    run(Settings(recipe=recipe, data=data, out=out, set=["epochs=1"]))
    assert load_run(out).recipe.epochs == 1
    assert not list(out.glob(".*"))


def test_a_record_of_someone_else_is_not_written_over(data: Path, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"artist": "Nico"}')
    with pytest.raises(AlreadyExists, match="not empty"):
        run(Settings(recipe=recipe, data=data, out=tmp_path))
    assert (tmp_path / "record.json").read_text() == '{"artist": "Nico"}'


def test_a_path_that_is_not_utf8_is_refused(data: Path, recipe: str, tmp_path: Path) -> None:
    odd = tmp_path / "p\udcff"
    shutil.copytree(data, odd)
    shutil.copy(recipe, odd / "r.yaml")
    for changed, told in (
        ({"data": odd}, "--data"),
        ({"out": odd / "r"}, "--out"),
        ({"table": odd / "t.csv"}, "--table"),
        ({"recipe": str(odd / "r.yaml")}, "the recipe"),
    ):
        settings = Settings(recipe=recipe, data=data, out=tmp_path / "r").model_copy(update=changed)
        with pytest.raises(BadSetting, match=rf"{told} is '.*udcff.*not UTF-8"):
            run(settings)
    assert not (tmp_path / "r").exists()


def test_a_run_is_resumed_as_it_was_started(whole: Path, recipe: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="dimension = 8, but now 9"):
        run(Settings(recipe=recipe, out=whole, set=["dimension=9"], resume=True))
    with pytest.raises(BadSetting, match="--set"):
        run(Settings(out=whole, set=["dimension=9"], resume=True))
    other = draw_folder(tmp_path / "other", classes=6, images=3)
    with pytest.raises(BadData, match="other images"):
        run(Settings(data=other, out=whole, resume=True))


def test_what_is_missing_is_asked_for(data: Path, recipe: str, tmp_path: Path) -> None:
    for settings, words in (
        (Settings(recipe=recipe, data=data), "--out"),
        (Settings(recipe=recipe, out=tmp_path / "a"), "--data"),
        (Settings(data=data, out=tmp_path / "a"), "needs a recipe"),
    ):
        with pytest.raises(BadSetting, match=words):
            run(settings)
    with pytest.raises(BadData, match="nowhere"):
        run(Settings(recipe=recipe, data=tmp_path / "nowhere", out=tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_list_shows_every_recipe_by_its_first_line_and_one_by_its_whole_head() -> None:
    result = run(Settings(list=True))
    assert [recipe["name"] for recipe in result["recipes"]] == recipe_names()
    told = render(result)
    assert "cub100-contrastive-xml" in told
    assert len(told.splitlines()) == len(recipe_names()) + 2
    assert "crossbatch train cub100-contrastive-xml --data" in render(
        run(Settings(list=True, recipe="cub100-contrastive-xml"))
    )


def test_a_recipe_for_another_data_set_is_refused(data: Path, recipe: str, tmp_path: Path) -> None:
    settings = Settings(recipe=recipe, data=data, out=tmp_path / "r", set=["made_for=cub"])
    with pytest.raises(BadData, match=r"small\.yaml is for the data set cub, .* was read as folder"):
        run(settings)
    assert not (tmp_path / "r").exists()


def test_a_loss_that_is_not_finite_stops_and_names_the_step(
    data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spoiled(histograms: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        calls.append(1)
        return histograms.sum() * (float("nan") if len(calls) == 4 else 1)

    monkeypatch.setattr(training.objective, "cross_batch_loss", spoiled)
    out = tmp_path / "wild"
    with pytest.raises(BadSetting, match=r"nan.* at step 4 \(epoch 2, batch 2\).*epoch 1 is kept"):
        run(Settings(recipe=recipe, data=data, out=out))
    tensors, state = load_checkpoint(out / "last.safetensors")
    assert state["epochs_done"] == 1
    assert all(torch.isfinite(value.float()).all() for value in tensors.values())


def test_test_images_are_never_opened(whole: Path, recipe: str, tmp_path: Path) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=4, size=18)
    for file in (data / "class05").iterdir():  # the one class that tests
        file.write_text("no image")
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "r"))
    assert result["unreadable"] == []
    (ours, _), (theirs, _) = (load_checkpoint(run / "best.safetensors") for run in (whole, tmp_path / "r"))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_without_xml_the_prototypes_stay(data: Path, recipe: str, tmp_path: Path) -> None:
    run(
        Settings(
            recipe=recipe, data=data, out=tmp_path / "r", set=["xml_weight=0", "epochs=1", "ema_decay=0"]
        )
    )
    tensors, state = load_checkpoint(tmp_path / "r" / "last.safetensors")
    start = build_embedder(load_run(tmp_path / "r").recipe)
    assert torch.equal(tensors["model.prototypes"], start.prototypes)
    assert not torch.equal(tensors["model.head.weight"], start.head.weight)
    assert state["history"][1]["xml"] == 0


def test_without_validation_the_last_epoch_is_kept(data: Path, recipe: str, tmp_path: Path) -> None:
    result = run(
        Settings(
            recipe=recipe, data=data, out=tmp_path / "r", set=["validation=0", "epochs=2", "ema_decay=0"]
        )
    )
    best, _ = load_checkpoint(tmp_path / "r" / "best.safetensors")
    last, _ = load_checkpoint(tmp_path / "r" / "last.safetensors")
    assert all(torch.equal(value, last[key]) for key, value in best.items())
    assert result["best"] == {"epoch": 2}
    assert "epoch 2 is kept" in render(result)


# Python 3.12 and newer tell every fork of a process with threads, which a torch process always has
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        ["head_init=whiten_within", "head_centre=0.5", "freeze_batchnorm=true", "freeze_stages=2"],
        ["precision=bf16-mixed", "head_init=pca", "jitter=0.2", "workers=1"],
    ],
)
def test_options_of_the_fine_tuning_recipe(
    options: list[str], data: Path, recipe: str, tmp_path: Path
) -> None:
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=["epochs=1", *options]))
    trained = load_run(tmp_path / "r")
    start = build_embedder(trained.recipe)
    tensors, _ = load_checkpoint(tmp_path / "r" / "last.safetensors")
    frozen = trained.recipe.freeze_stages > 0
    assert torch.equal(tensors["model.backbone.body.conv.weight"], start.backbone.body.conv.weight) is frozen  # type: ignore[union-attr, arg-type]
    running = "backbone.body.blocks.8.bn2.running_mean"
    assert torch.equal(tensors[f"model.{running}"], start.state_dict()[running]) is frozen
    assert result["best"]["map_at_r"] >= 0


def test_bad_images_are_skipped_and_listed(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=3)
    (data / "class01" / "text.jpg").write_text("no image")
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=["epochs=1"]))
    assert [bad["key"] for bad in result["unreadable"]] == ["class01/text.jpg"]
    assert "skipped class01/text.jpg" in render(result)
    assert "text.jpg" not in caplog.text  # once is enough
    assert "1 images cannot be read and are left out" in caplog.text
    assert json.loads((tmp_path / "r" / "record.json").read_text())["data"]["unreadable"] == [
        "class01/text.jpg"
    ]
    for file in (data / "class00").iterdir():
        file.write_text("no image")
    with pytest.raises(BadData, match="'class00'"):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "s"))


def test_validation_that_cannot_be_read_is_told_before_training(recipe: str, tmp_path: Path) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=3)
    for file in (*(data / "class01").iterdir(), *(data / "class03").iterdir()):
        file.write_text("no image")
    with pytest.raises(
        BadData, match=r"none of the 2 validation classes has two images.*6 images cannot \(first"
    ):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_training_and_validation_images_share_the_memory(
    data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Pictures] = []
    kept: list[float] = []

    def pictures(*arguments: Any, keep: float, **options: Any) -> Pictures:
        kept.append(keep)
        made.append(Pictures(*arguments, keep=keep, **options))
        return made[-1]

    monkeypatch.setattr(training.train, "Pictures", pictures)
    run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=["epochs=1", "memory_gib=1.0e-5"]))
    assert kept[0] == 1e-5 * 2**30
    assert kept[1] == made[0].room == kept[0] - 11 * 18 * 18 * 3  # all of 12 images but one


def test_an_untrained_network_is_not_taken_for_a_trained_one(
    data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "r"
    _cut_at(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(Settings(recipe=recipe, data=data, out=out))
    with pytest.raises(NotFound, match=r"no trained weights.*crossbatch train --resume --out"):
        load_run(out)
    _cut_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(Settings(out=out, resume=True))
    load_run(out)
    assert "has ended 1 of its 3 epochs" in caplog.text
    monkeypatch.undo()
    still = [f"{part}learning_rate=0" for part in ("", "head_", "prototype_")]
    run(
        Settings(
            recipe=recipe, data=data, out=tmp_path / "s", set=["epochs=1", "freeze_batchnorm=true", *still]
        )
    )
    caplog.clear()
    load_run(tmp_path / "s")
    assert "untrained: on validation, no epoch did better than the start" in caplog.text


def test_a_damaged_or_foreign_checkpoint_is_told(data: Path, recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "r"
    run(Settings(recipe=recipe, data=data, out=out, set=["epochs=1"]))
    tensors, state = load_checkpoint(out / "last.safetensors")
    save_checkpoint(out / "last.safetensors", tensors, {"epochs_done": 1, "history": []})
    with pytest.raises(BadArtifact, match=r"last\.safetensors is damaged.*no best"):
        run(Settings(out=out, resume=True))
    del tensors["model.prototypes"]
    save_checkpoint(out / "last.safetensors", tensors, state)
    with pytest.raises(ModelMismatch, match="prototypes"):
        run(Settings(out=out, resume=True))
    tensors, state = load_checkpoint(out / "best.safetensors")
    save_checkpoint(out / "best.safetensors", tensors, {"epoch": None})
    with pytest.raises(BadArtifact, match=r"best\.safetensors is damaged.*no epoch"):
        load_run(out)
    (out / "best.safetensors").write_bytes(b"short")
    with pytest.raises(BadArtifact, match="damaged"):
        load_run(out)
    (out / "record.json").write_text("{")
    with pytest.raises(BadArtifact, match=r"record\.json"):
        load_run(out)
    (out / "recipe.yaml").write_text("[")
    with pytest.raises(BadArtifact, match=r"recipe\.yaml"):
        load_run(out)


OPTIONS = {
    "memory, recursion and mixing": [
        "loss=multi_similarity", "memory_batches=2", "xml_prototypes=recursion", "mixing=all",
        "xml_warmup=0.5",
    ],
    "proxies and drops": [
        "loss=proxy_anchor", "schedule=drops", "drop_epochs=[1]", "freeze_epochs=1", "clip_value=0.1",
        "optimizer=adam",
    ],
    "messages and fp16": ["loss=libc", "loss_options={heads: 2}", "precision=16-mixed", "optimizer=radam"],
    "rmsprop, erasing": ["optimizer=rmsprop", "erasing=0.5", "pooling=gap", "freeze_batchnorm_weights=true"],
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_a_run_remembers_it_resumes_bit_for_bit(
    name: str, data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = OPTIONS[name]
    run(Settings(recipe=recipe, data=data, out=tmp_path / "whole", set=more))
    for step in (1, 5):
        _cut_at(step, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            run(Settings(recipe=recipe, data=data, out=tmp_path / f"cut{step}", set=more))
        monkeypatch.undo()
        run(Settings(out=tmp_path / f"cut{step}", resume=True))
        _equal(tmp_path / "whole", tmp_path / f"cut{step}")


def test_the_backbone_rests_over_its_first_epochs(data: Path, recipe: str, tmp_path: Path) -> None:
    small = ["epochs=1", "validation=0", "ema_decay=0", "loss=proxy_nca"]
    run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=[*small, "freeze_epochs=1"]))
    tensors, _ = load_checkpoint(tmp_path / "r" / "last.safetensors")
    start = build_embedder(load_run(tmp_path / "r").recipe).state_dict()
    for key, value in start.items():
        still = key.startswith("backbone.")
        assert torch.equal(tensors[f"model.{key}"], value) is still, key


def test_training_stops_when_patience_is_out(data: Path, recipe: str, tmp_path: Path) -> None:
    still = [f"{part}learning_rate=0" for part in ("", "head_", "prototype_")]
    settings = [*still, "epochs=9", "freeze_batchnorm=true", "patience=2", "ema_decay=0"]
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=settings))
    assert result["best"]["epoch"] == 0  # nothing moved, so nothing was better
    assert result["epochs"] == 2
    assert "Trained 2 epochs" in render(result)
    again = run(Settings(out=tmp_path / "r", resume=True))
    assert again["epochs"] == 2
    load_run(tmp_path / "r")  # which warns only of a training that was cut


def test_an_epoch_that_is_hardly_better_is_not_better(data: Path, recipe: str, tmp_path: Path) -> None:
    result = run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=["min_delta=0.99"]))
    assert result["best"]["epoch"] == 0


def test_fp16_leaves_out_steps_that_overflow_but_not_for_ever(
    data: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(objective: torch.nn.Module, _: object) -> None:
        for parameter in objective.parameters():  # the proxies
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))

    monkeypatch.setattr(training.fit, "mean_gradients", overflow)
    half = ["precision=16-mixed", "optimizer=adam", "loss=proxy_nca", "epochs=50"]
    with pytest.raises(BadSetting, match=r"length (inf|nan) at step \d+ .* lower the learning rates"):
        run(Settings(recipe=recipe, data=data, out=tmp_path / "r", set=half))
    _, state = load_checkpoint(tmp_path / "r" / "last.safetensors")
    assert state["epochs_done"] > 1  # the first overflows were borne


def test_curves_for_tensorboard(data: Path, recipe: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "r"
    run(Settings(recipe=recipe, data=data, out=out, tensorboard=True))
    run(Settings(out=out, resume=True, tensorboard=True))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    _, state = load_checkpoint(out / "last.safetensors")
    found = {scalar.step: scalar.value for scalar in events.Scalars("map_at_r")}
    assert found == pytest.approx({row["steps"]: row["map_at_r"] for row in state["history"]}, abs=1e-6)
    assert "loss" in events.Tags()["scalars"]


def test_groups_of_the_optimizer() -> None:
    recipe = Recipe(learning_rate=1, head_learning_rate=2, prototype_learning_rate=3, weight_decay=0.1)
    embedder = build_embedder(recipe)
    optimizer = build_optimizer(embedder, torch.nn.Identity(), recipe)
    groups: dict[int, tuple[float, float]] = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(groups) == len(list(embedder.parameters()))
    assert groups[id(embedder.backbone.body.conv.weight)] == (1, 0.1)  # type: ignore[union-attr]
    assert groups[id(embedder.backbone.body.bn.weight)] == (1, 0)  # type: ignore[union-attr]
    assert groups[id(embedder.head.weight)] == (2, 0.1)
    assert groups[id(embedder.prototypes)] == (3, 0)
    assert optimizer.defaults["fused"]


def test_the_fused_step_is_the_plain_one() -> None:
    recipe = Recipe(learning_rate=0.01, weight_decay=0.1)
    nets = [build_embedder(recipe).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [build_optimizer(net, torch.nn.Identity(), recipe) for net in nets]
    for group in optimizers[1].param_groups:
        group["fused"] = False
    features = nets[0](torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    (features.embeddings.square().mean() + features.histograms.square().mean()).backward()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        theirs.grad = ours.grad  # in the memory format of convolutions, as training has it
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    start = build_embedder(recipe).backbone.state_dict()["body.conv.weight"]
    assert not torch.equal(nets[0].backbone.state_dict()["body.conv.weight"], start)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_moving_average_against_a_loop() -> None:
    net = torch.nn.Linear(2, 2)
    average = average_weights(net, 0.5)  # type: ignore[arg-type]
    expected: Any = None
    for step in range(12):
        with torch.no_grad():
            torch.nn.init.normal_(net.weight)
        average.update_parameters(net)
        decay = min(0.5, (1 + step) / (10 + step))
        now = net.weight.detach().clone()
        expected = now if step == 0 else decay * expected + (1 - decay) * now
        torch.testing.assert_close(average.module.state_dict()["weight"], expected)


def test_frozen_batchnorm_keeps_its_statistics() -> None:
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)).train()
    net[0].weight.requires_grad_(False)
    freeze_batchnorm(net, whole=False)
    assert [layer.training for layer in net] == [False, True]
    freeze_batchnorm(net, whole=True)
    assert [layer.training for layer in net] == [False, False]
