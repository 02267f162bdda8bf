"""The training loop: every setting reaches the step that it is about."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import training.loop.fit
import training.method.cross_batch
import training.train
from serving.errors import BadData, BadSetting
from tests.training.small import Train, draw_folder
from training.loop.checkpoint import load_checkpoint
from training.loop.logbook import dead_note, waited_share
from training.loop.run import load_run
from training.loop.trainee import start_trainee
from training.losses import metrix
from training.network.embedder import Embedder, build_embedder
from training.recipes.recipe import Recipe
from training.train import Settings, render, run

# Python 3.12 and newer tell every fork of a process with threads, which a torch process always has
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def _last(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights after the last epoch, and the rows of all."""
    tensors, state = load_checkpoint(out / "last.safetensors")
    return tensors, state["history"]


def test_a_nan_names_its_step(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spoiled(histograms: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        calls.append(1)
        return histograms.sum() * (float("nan") if len(calls) == 6 else 1)  # the watch calls, too

    monkeypatch.setattr(training.method.cross_batch, "cross_batch_loss", spoiled)
    with pytest.raises(BadSetting, match=r"nan.* at step 4 \(epoch 2, batch 2\).*epoch 1 is kept"):
        train(tmp_path / "wild")
    tensors, rows = _last(tmp_path / "wild")
    assert len(rows) == 2  # the start, and an epoch
    assert all(torch.isfinite(value.float()).all() for value in tensors.values())


def test_without_xml_a_reconstruction_alone_moves_the_codebook(train: Train, tmp_path: Path) -> None:
    plain = ["xml_weight=0", "epochs=1", "ema_decay=0", "clip_norm=0.1"]
    train(tmp_path / "plain", *plain)
    train(tmp_path / "learnt", *plain, "reconstruction_weight=1")
    (first, rows), (second, learnt) = _last(tmp_path / "plain"), _last(tmp_path / "learnt")
    start = build_embedder(load_run(tmp_path / "plain").recipe).state_dict()
    for name, value in start.items():
        assert torch.equal(first[f"model.{name}"], value) == (name == "codebook"), name
        assert torch.equal(first[f"model.{name}"], second[f"model.{name}"]) == (name != "codebook"), name
    assert rows[1]["xml"] == 0
    assert "eigenvalues" not in rows[1]
    assert {"eigenvalues", "rebuilt_cosine"} <= set(learnt[1])
    assert "xml_gradient_share" not in learnt[1]


def test_a_dead_term_is_told_once(train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "r", "epochs=2", "assignment_scale=0.001", "pooling=gem")
    for row in _last(tmp_path / "r")[1][1:]:
        assert row["eigenvalues"] == 1
        assert row["xml_gradient_share"] > 0
    assert caplog.text.count("The cross-batch term is dead at epoch 1") == 1
    assert "dead at epoch 2" not in caplog.text


def test_without_validation_the_last_epoch_is_kept(train: Train, tmp_path: Path) -> None:
    result = train(tmp_path / "r", "validation=0", "epochs=2", "ema_decay=0")
    best, _ = load_checkpoint(tmp_path / "r" / "best.safetensors")
    last, _ = _last(tmp_path / "r")
    assert all(torch.equal(value, last[key]) for key, value in best.items())
    assert result["best"] == {"epoch": 2}
    assert "epoch 2 is kept" in render(result)


@pytest.mark.parametrize(
    ("settings", "stays"),
    [
        ("precision=bf16-mixed head_init=pca jitter=0.2 workers=1", "nothing"),
        ("head_learning_rate=0 prototype_learning_rate=0 head_init=pca codebook_init=k_means", "nothing"),
        ("head_init=whiten_within head_centre=0.5 freeze_epochs=1", r"backbone\."),
        ("freeze_batchnorm_weights=true", r"backbone\..*bn\d?\."),
        ("freeze_batchnorm=true freeze_stages=2", r".*body\.(conv|bn|blocks\.0)\.|.*(running|batches)_"),
    ],
)
def test_what_is_frozen_stays_all_else_moves(train: Train, settings: str, stays: str, tmp_path: Path) -> None:
    train(tmp_path / "r", "epochs=1", "ema_decay=0", "validation=0", *settings.split())
    tensors, _ = _last(tmp_path / "r")
    start = build_embedder(load_run(tmp_path / "r").recipe).state_dict()
    still = {name for name, value in start.items() if torch.equal(tensors[f"model.{name}"], value)}
    assert still == {name for name in start if re.match(stays, name)}


def test_training_stops_when_patience_is_out(train: Train, tmp_path: Path) -> None:
    still = [f"{part}learning_rate=0" for part in ("", "head_", "prototype_")]
    settings = [*still, "epochs=9", "freeze_batchnorm=true", "patience=2", "ema_decay=0"]
    result = train(tmp_path / "r", *settings)
    assert result["best"]["epoch"] == 0  # nothing moved, so nothing was better
    assert result["epochs"] == 2
    assert "Trained 2 epochs" in render(result)
    again = run(Settings(out=tmp_path / "r", resume=True))
    assert again["epochs"] == 2
    load_run(tmp_path / "r")  # which warns only of a training that was cut


def test_fp16_bears_some_overflows(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(objective: torch.nn.Module, _: object) -> None:
        for parameter in objective.parameters():  # the proxies
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))

    monkeypatch.setattr(training.loop.fit, "mean_gradients", overflow)
    half = ["precision=16-mixed", "optimizer=adam", "loss=proxy_nca", "image_size=8"]
    with pytest.raises(BadSetting, match=r"length (inf|nan) at step \d+ .* lower the learning rates"):
        train(tmp_path / "r", *half, "epochs=9", "batches_per_epoch=6")
    _, rows = _last(tmp_path / "r")
    assert len(rows) > 2  # the first overflows were borne, and spoil no mean
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_curves_for_tensorboard(train: Train, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "r"
    train(out, tensorboard=True)
    run(Settings(out=out, resume=True, tensorboard=True))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    found = {scalar.step: scalar.value for scalar in events.Scalars("map_at_r")}
    assert found == pytest.approx({row["steps"]: row["map_at_r"] for row in _last(out)[1]}, abs=1e-6)
    assert "loss" in events.Tags()["scalars"]


def test_the_schedule_reaches_the_optimizer_and_evaluation_its_epochs(train: Train, tmp_path: Path) -> None:
    changes = ["schedule=drops", "drop_epochs=[1]", "drop_factor=0.5", "evaluate_every=2", "epochs=3"]
    train(tmp_path / "r", *changes, "learning_rate=0.004")
    _, (start, *rows) = _last(tmp_path / "r")
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.004, 0.002, 0.002])
    assert ["map_at_r" in row for row in (start, *rows)] == [True, False, True, True]  # the last one always


def test_waiting_for_batches_is_told_apart(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by 3 seconds for each batch, and by 5 for each step."""
    now, deal, check = 0.0, training.loop.fit._batches, training.loop.fit._check_finite

    def slowly(*given: Any) -> Iterator[Any]:
        nonlocal now
        for batch in deal(*given):
            now += 3
            yield batch

    def step(*given: Any, **more: Any) -> None:
        nonlocal now
        now += 5
        check(*given, **more)

    monkeypatch.setattr(training.loop.fit, "time", Mock(monotonic=lambda: now))
    monkeypatch.setattr(training.loop.fit, "_batches", slowly)
    monkeypatch.setattr(training.loop.fit, "_check_finite", step)
    found = train(tmp_path / "r", "epochs=2")
    _, (_, *rows) = _last(tmp_path / "r")
    steps = rows[0]["steps"]
    assert [(row["waited"], row["seconds"]) for row in rows] == 2 * [(3 * steps, 8 * steps)]
    assert found["waited"] == 3 / 8
    assert "Steps waited for batches 37.5 % of the epochs' time." in render(found)
    assert waited_share([{"epoch": 0}, {"epoch": 1, "seconds": 9.0}]) is None


@pytest.mark.parametrize(
    ("level", "passes", "middles"), [("embedding", 1, []), ("input", 2, []), ("feature", 2, [12])]
)
def test_each_level_mixes_at_its_own_place(
    train: Train, level: str, passes: int, middles: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, inner = list[int](), Embedder.forward
    mixing_at = Mock(side_effect=metrix.mixing_at)

    def forward(self: Embedder, images: torch.Tensor, **options: bool) -> Any:
        if self.training:
            seen.append(len(images))
        return inner(self, images, **options)

    monkeypatch.setattr(Embedder, "forward", forward)
    monkeypatch.setattr(metrix, "mixing_at", mixing_at)
    changes = ["loss=multi_similarity", f"mixing={level}", "images_per_class=4", "batches_per_epoch=1"]
    train(tmp_path / "r", *changes, "epochs=1")
    mixed = [len(call.args[1].first) for call in mixing_at.call_args_list]
    assert (seen, mixed) == ([12] * passes, middles)


def test_a_fault_in_a_loader_is_told(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw_folder(tmp_path / "data", classes=6, images=4, size=18)

    def start(*arguments: Any, **options: Any) -> Any:
        (data / "class00" / "0.png").unlink()
        return start_trainee(*arguments, **options)

    monkeypatch.setattr(training.train, "start_trainee", start)
    with pytest.raises(BadData, match=r"^[^\n]*0\.png could be read before, but now cannot: [^\n]*$"):
        train(tmp_path / "r", "workers=1", "memory_gib=0", data=data)


def test_a_dead_term_is_told_with_what_wakes_it() -> None:
    recipe = Recipe(prototypes=64)
    note = dead_note([{"epoch": 1, "eigenvalues": 9}, {"epoch": 2, "eigenvalues": 1.5}, {"epoch": 3}], recipe)
    assert note is not None
    assert "dead at epoch 2: 1.5 of 64" in note
    for setting in ("assignment_scale", "assign_on", "codebook_init", "ridge"):
        assert setting in note
    small = Recipe(classes_per_batch=2, images_per_class=2)
    assert "A half of a batch is 2 images" in str(dead_note([{"epoch": 1, "eigenvalues": 2}], small))
    assert dead_note([{"epoch": 1, "eigenvalues": 1}, {"epoch": 2, "eigenvalues": 4}], recipe) is None
    assert dead_note([{"epoch": 1}], recipe) is None
    assert dead_note([{"epoch": 1, "eigenvalues": 1}], Recipe(xml_weight=0, reconstruction_weight=1)) is None
    assert dead_note([{"epoch": 1, "eigenvalues": 2}], Recipe(prototypes=2)) is None
