"""What moves the weights: groups, clipping, averages, and what stays frozen."""

from typing import Any

import pytest
import torch

from training.loop.optimizer import average_weights, build_optimizer, clip, freeze_batchnorm
from training.losses.loss import build_loss
from training.network.embedder import build_embedder
from training.recipes.recipe import Recipe


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
    assert groups[id(embedder.codebook)] == (3, 0)
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


def test_gradients_are_shortened_and_then_cut() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1)
    for weight, grad in zip(weights, ([3.0, 0.0], [0.0, -4.0]), strict=True):
        weight.grad = torch.tensor(grad)
    assert clip(optimizer, norm=0, value=0) == 5  # left as they are
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[3, 0], [0, -4]]
    assert clip(optimizer, norm=2.5, value=1.8) == 5
    grads = [weight.grad.tolist() for weight in weights if weight.grad is not None]
    assert grads == [pytest.approx([1.5, 0], abs=1e-4), pytest.approx([0, -1.8], abs=1e-4)]


def test_what_a_loss_learns_has_a_rate_of_its_own() -> None:
    recipe = Recipe(head_learning_rate=2, loss_learning_rate=4, weight_decay=0.1)
    loss = build_loss("proxy_nca", classes=3, dimension=recipe.dimension)
    optimizer = build_optimizer(build_embedder(recipe), loss, recipe)
    (proxies,) = loss.parameters()
    (group,) = [group for group in optimizer.param_groups if any(p is proxies for p in group["params"])]
    assert (group["lr"], group["peak"], group["weight_decay"]) == (4, 4, 0)


def test_a_poolings_exponent_trains_with_the_head_and_without_decay() -> None:
    recipe = Recipe(pooling="gem", head_learning_rate=2, weight_decay=0.1)
    embedder = build_embedder(recipe)
    optimizer = build_optimizer(embedder, torch.nn.Identity(), recipe)
    (exponent,) = embedder.pool.parameters()
    (group,) = [group for group in optimizer.param_groups if any(p is exponent for p in group["params"])]
    assert (group["lr"], group["weight_decay"]) == (2, 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("radam", torch.optim.RAdam),
        ("rmsprop", torch.optim.RMSprop),
    ],
)
def test_rules_by_name(name: str, kind: type) -> None:
    recipe = Recipe.model_validate({"optimizer": name, "momentum": 0.7})
    optimizer = build_optimizer(build_embedder(recipe), torch.nn.Identity(), recipe)
    assert type(optimizer) is kind
    assert optimizer.defaults.get("momentum", 0.7) == 0.7


def test_batchnorm_without_weights_can_be_frozen() -> None:
    net = torch.nn.BatchNorm2d(3, affine=False).train()
    freeze_batchnorm(net, whole=False)
    assert net.training
    freeze_batchnorm(net, whole=True)
    assert not net.training
