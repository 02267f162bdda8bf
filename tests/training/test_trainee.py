"""What moves the weights: closed-form heads, groups, clipping, averages, what stays frozen, schedules."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.errors import BadData, BadSetting
from training.loop import trainee
from training.loop.trainee import build_optimizer, clip, rate_factor, xml_weight
from training.losses.loss import build_loss
from training.network.embedder import build_embedder
from training.recipes.recipe import Recipe


def test_groups_of_the_optimizer() -> None:
    rates: dict[str, float] = {"prototype_learning_rate": 3, "loss_learning_rate": 4}
    recipe = Recipe(learning_rate=1, head_learning_rate=2, **rates, weight_decay=0.1, pooling="gem")
    embedder, loss = build_embedder(recipe), build_loss("proxy_nca", classes=3, dimension=recipe.dimension)
    optimizer = build_optimizer(embedder, loss, recipe)
    names = {id(parameter): name for name, parameter in embedder.named_parameters()}
    groups = {
        names.get(id(parameter), "proxies"): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert groups.keys() == {*names.values(), "proxies"}
    expected = {"proxies": (4, 0), "backbone.body.conv.weight": (1, 0.1), "backbone.body.bn.weight": (1, 0)}
    expected |= {"head.weight": (2, 0.1), "pool.exponent": (2, 0), "codebook": (3, 0)}
    assert expected.items() <= groups.items()
    assert optimizer.defaults["fused"]


def test_the_moving_average_against_a_loop() -> None:
    net = torch.nn.Linear(2, 2)
    average = trainee.average_weights(net, 0.5)  # type: ignore[arg-type]
    expected: Any = None
    for step in range(12):
        with torch.no_grad():
            torch.nn.init.normal_(net.weight)
        average.update_parameters(net)
        decay = min(0.5, (1 + step) / (10 + step))
        now = net.weight.detach().clone()
        expected = now if step == 0 else decay * expected + (1 - decay) * now
        torch.testing.assert_close(average.module.state_dict()["weight"], expected)


@pytest.mark.parametrize(
    ("norm", "value", "expected"),
    [
        (0, 0, [[3, 0], [0, -4], [0, 12]]),
        (2.5, 1.8, [[1.5, 0], [0, -1.8], [0, 1.8]]),
        (9, 0, [[3, 0], [0, -4], [0, 9]]),
    ],
)
def test_gradients_are_shortened_and_cut(norm: float, value: float, expected: list[list[float]]) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for weight, grad in zip(weights, ([3.0, 0.0], [0.0, -4.0], [0.0, 12.0]), strict=True):
        weight.grad = torch.tensor(grad)
    assert clip(torch.optim.SGD(weights, lr=1), weights[2], norm=norm, value=value) == 13
    grads = [weight.grad.tolist() for weight in weights if weight.grad is not None]
    assert grads == [pytest.approx(each, abs=1e-4) for each in expected]


@pytest.mark.parametrize(("name", "kind"), [("radam", torch.optim.RAdam), ("rmsprop", torch.optim.RMSprop)])
def test_rules_by_name(name: str, kind: type) -> None:
    recipe = Recipe.model_validate({"optimizer": name, "momentum": 0.7})
    optimizer = build_optimizer(build_embedder(recipe), torch.nn.Identity(), recipe)
    assert type(optimizer) is kind
    assert optimizer.defaults.get("momentum", 0.7) == 0.7


def test_warm_up_and_half_a_cosine() -> None:
    cosine = Recipe(warmup=0.2)
    factors = [rate_factor(step, 10, cosine) for step in range(10)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert factors[6] == pytest.approx(0.5)
    assert factors == [*factors[:3], *sorted(factors[3:], reverse=True)]
    assert rate_factor(9, 10, Recipe(schedule="constant")) == 1


def test_rates_drop_after_the_epochs_that_are_named() -> None:
    recipe = Recipe(schedule="drops", drop_epochs=[4, 2], drop_factor=0.5, warmup=0.1)
    factors = [rate_factor(step, 20, recipe, per_epoch=4) for step in range(20)]
    assert factors[:2] == pytest.approx([1 / 3, 2 / 3])
    assert factors[2:] == [1] * 6 + [0.5] * 8 + [0.25] * 4


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lambda_rises_over_its_warm_up_and_then_follows_its_schedule(schedule: str) -> None:
    recipe = Recipe.model_validate({"xml_weight": 0.2, "xml_warmup": 0.3, "xml_schedule": schedule})
    weights = [xml_weight(step, 10, recipe) for step in range(10)]
    assert weights[:3] == pytest.approx([0.05, 0.1, 0.15])
    for step in range(3, 10):
        gone = (step - 3) / 7
        expected = {"constant": 1, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}
        assert weights[step] == pytest.approx(0.2 * expected[schedule])


def closed_form_head(rows: Tensor, labels: Tensor, *, form: str, dimension: int, **more: float) -> Tensor:
    chosen = {f"head_{name}": value for name, value in more.items()}
    recipe = Recipe.model_validate({"head_init": form, "dimension": dimension} | chosen)
    return trainee.closed_form_head(rows, labels, recipe)


@pytest.fixture(scope="module")
def features() -> tuple[Tensor, Tensor]:
    """(40, 6) of 4 classes, with a mean far from zero and axes of unequal spread."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    centres = rng.normal(size=(4, 6)) * 2
    rows = 5 + centres[labels] + rng.normal(size=(40, 6)) * np.array([3, 2, 1, 0.5, 0.3, 0.1])
    return torch.from_numpy(rows), torch.from_numpy(labels)


def test_pca_is_the_best_approximation_of_its_rank(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    head = closed_form_head(rows, labels, form="pca", dimension=2).double()
    _, _, axes = np.linalg.svd(rows.numpy(), full_matrices=False)
    for i in range(2):  # the axes of the uncentred rows, up to sign and the common scale
        cosine = float(head[i] @ torch.from_numpy(axes[i]) / head[i].norm())
        assert abs(cosine) == pytest.approx(1, abs=1e-6)
    assert head[0].norm() == pytest.approx(float(head[1].norm()), rel=1e-5)


def _scatter(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    total = np.zeros((rows.shape[1],) * 2)
    for row, label in zip(rows, labels, strict=True):
        mean = np.mean([r for r, one in zip(rows, labels, strict=True) if one == label], axis=0)
        total += np.outer(row - mean, row - mean)
    return total / len(rows)


@pytest.mark.parametrize(("form", "power"), [("whiten", 0.5), ("whiten_within", 0.25), ("whiten_within", 1)])
def test_whitening_against_the_formula(form: str, power: float, features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    head = closed_form_head(rows, labels, form=form, dimension=6, shrinkage=0.7, power=power).double()
    groups = labels if form == "whiten_within" else torch.zeros_like(labels)
    scatter = _scatter(rows.numpy(), groups.numpy())
    values, vectors = np.linalg.eigh(scatter)
    metric = vectors @ np.diag((values + 0.7 * np.trace(scatter) / 6) ** (-2 * power)) @ vectors.T
    found = (head.T @ head).numpy()  # the axes rotate, the metric W'W stays
    np.testing.assert_allclose(found / np.trace(found), metric / np.trace(metric), atol=1e-5)


def test_the_means_direction_is_taken_out_whole_or_in_part(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    mean = rows.mean(dim=0)
    whole = closed_form_head(rows, labels, form="pca", dimension=5, centre=1.0).double()
    assert float((whole @ mean).norm() / mean.norm() / whole.norm()) < 1e-6
    half = closed_form_head(rows, labels, form="pca", dimension=6, centre=0.5).double()
    none = closed_form_head(rows, labels, form="pca", dimension=6).double()
    relative = [float((head @ mean).norm() / head.norm()) for head in (none, half)]
    assert 0 < relative[1] < relative[0]


def test_length_is_the_mean_of_the_embeddings(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    head = closed_form_head(rows, labels, form="whiten", dimension=3, length=5.0)
    assert (head.dtype, head.shape) == (torch.float32, (3, 6))
    assert float((rows @ head.double().T).norm(dim=1).mean()) == pytest.approx(5, rel=1e-5)


def test_what_cannot_be_done_is_said(features: tuple[Tensor, Tensor]) -> None:
    rows, labels = features
    with pytest.raises(BadSetting, match="at most the backbone's 6"):
        closed_form_head(rows, labels, form="pca", dimension=7)
    with pytest.raises(BadData, match="do not vary"):
        closed_form_head(rows, torch.arange(40), form="whiten_within", dimension=3)  # one image a class
