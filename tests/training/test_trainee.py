"""What moves the weights: groups, clipping, averages, what stays frozen, schedules."""

import math
from typing import Any

import pytest
import torch

from training.loop import trainee
from training.loop.trainee import build_optimizer, clip, freeze_batchnorm, rate_factor, xml_weight
from training.losses.loss import build_loss
from training.network.embedder import build_embedder
from training.recipes.recipe import Recipe


def test_groups_of_the_optimizer() -> None:
    rates: dict[str, float] = {"prototype_learning_rate": 3, "loss_learning_rate": 4}
    recipe = Recipe(learning_rate=1, head_learning_rate=2, **rates, weight_decay=0.1, pooling="gem")
    embedder, loss = build_embedder(recipe), build_loss("proxy_nca", classes=3, dimension=recipe.dimension)
    optimizer = build_optimizer(embedder, loss, recipe)
    groups: dict[int, tuple[float, float]] = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    (proxies,) = loss.parameters()
    assert len(groups) == len(list(embedder.parameters())) + 1
    assert groups[id(proxies)] == (4, 0)
    assert groups[id(embedder.backbone.body.conv.weight)] == (1, 0.1)  # type: ignore[union-attr]
    assert groups[id(embedder.backbone.body.bn.weight)] == (1, 0)  # type: ignore[union-attr]
    assert groups[id(embedder.head.weight)] == (2, 0.1)
    (exponent,) = embedder.pool.parameters()
    assert groups[id(exponent)] == (2, 0)
    assert groups[id(embedder.codebook)] == (3, 0)
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


def test_frozen_batchnorm_keeps_its_statistics() -> None:
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)).train()
    net[0].weight.requires_grad_(False)
    freeze_batchnorm(net, whole=False)
    assert [layer.training for layer in net] == [False, True]
    freeze_batchnorm(net, whole=True)
    assert [layer.training for layer in net] == [False, False]


@pytest.mark.parametrize(
    ("norm", "value", "expected"),
    [
        (0, 0, [[3, 0], [0, -4], [0, 12]]),
        (2.5, 1.8, [[1.5, 0], [0, -1.8], [0, 1.8]]),
        (9, 0, [[3, 0], [0, -4], [0, 9]]),
    ],
)
def test_gradients_are_shortened_the_codebooks_apart_and_then_cut(
    norm: float, value: float, expected: list[list[float]]
) -> None:
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
