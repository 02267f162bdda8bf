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
    rates = {
        "learning_rate": 1,
        "head_learning_rate": 2,
        "prototype_learning_rate": 3,
        "loss_learning_rate": 4,
    }
    recipe = Recipe.model_validate(rates | {"loss_learning_rate": 4, "weight_decay": 0.1})
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


def test_gradients_are_shortened_and_then_cut() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1)
    for weight, grad in zip(weights, ([3.0, 0.0], [0.0, -4.0]), strict=True):
        weight.grad = torch.tensor(grad)
    assert clip(optimizer, torch.zeros(0), norm=0, value=0) == 5  # left as they are
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[3, 0], [0, -4]]
    assert clip(optimizer, torch.zeros(0), norm=2.5, value=1.8) == 5
    grads = [weight.grad.tolist() for weight in weights if weight.grad is not None]
    assert grads == [pytest.approx([1.5, 0], abs=1e-4), pytest.approx([0, -1.8], abs=1e-4)]


def test_the_codebook_is_clipped_apart() -> None:
    weight, codebook = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, codebook], lr=1)
    weight.grad, codebook.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, -40.0])
    assert clip(optimizer, codebook, norm=4, value=0) == pytest.approx(1609**0.5)
    assert weight.grad.tolist() == [3, 0]  # which a gradient of the whole would be shortened with
    assert codebook.grad.tolist() == [0, pytest.approx(-4, abs=1e-4)]


def test_a_poolings_exponent_trains_with_the_head_and_without_decay() -> None:
    recipe = Recipe(pooling="gem", head_learning_rate=2, weight_decay=0.1)
    embedder = build_embedder(recipe)
    optimizer = build_optimizer(embedder, torch.nn.Identity(), recipe)
    (exponent,) = embedder.pool.parameters()
    (group,) = [group for group in optimizer.param_groups if any(p is exponent for p in group["params"])]
    assert (group["lr"], group["weight_decay"]) == (2, 0)


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
    recipe = Recipe(schedule="drops", drop_epochs=[2, 4], drop_factor=0.5, warmup=0.1)
    factors = [rate_factor(step, 20, recipe, per_epoch=4) for step in range(20)]
    assert factors[:2] == pytest.approx([1 / 3, 2 / 3])
    assert factors[2:] == [1] * 6 + [0.5] * 8 + [0.25] * 4
    unsorted = Recipe(schedule="drops", drop_epochs=[4, 2], drop_factor=0.5, warmup=0.1)
    assert factors == [rate_factor(step, 20, unsorted, per_epoch=4) for step in range(20)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lambda_rises_over_its_warm_up_and_then_follows_its_schedule(schedule: str) -> None:
    recipe = Recipe.model_validate({"xml_weight": 0.2, "xml_warmup": 0.3, "xml_schedule": schedule})
    weights = [xml_weight(step, 10, recipe) for step in range(10)]
    assert weights[:3] == pytest.approx([0.05, 0.1, 0.15])
    for step in range(3, 10):
        gone = (step - 3) / 7
        expected = {"constant": 1, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}
        assert weights[step] == pytest.approx(0.2 * expected[schedule])
