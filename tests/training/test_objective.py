"""The objective: its parts against the formulas, and what it remembers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from serving.errors import BadSetting
from training.checkpoint import load_module
from training.cross_batch import cross_batch_loss, split_classes
from training.loss import build_loss
from training.metrix import Pairs, draw_pairs, mix, mixed_loss
from training.objective import Objective, Terms
from training.recipe import Recipe
from training.recursion import start, update

LABELS = torch.arange(4).repeat_interleave(3)


def _recipe(**settings: Any) -> Recipe:
    small = {"dimension": 5, "prototypes": 3, "classes_per_batch": 4, "images_per_class": 3}
    return Recipe.model_validate(small | settings)


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(12, 5, generator=generator, requires_grad=True)
    histograms = torch.randn(12, 3, generator=generator).softmax(dim=1).requires_grad_()
    return embeddings, histograms


def _measure(
    objective: Objective, *, step: int = 0, weight: float = 0.3, seed: int = 0, **more: Any
) -> Terms:
    embeddings, histograms = _batch(seed)
    halves = torch.Generator().manual_seed(7)
    told: Terms = objective(embeddings, histograms, LABELS, step=step, weight=weight, halves=halves, **more)
    return told


def test_the_whole_is_the_weighted_sum_of_its_parts() -> None:
    embeddings, histograms = _batch()
    loss = build_loss("contrastive", classes=4, dimension=5, neg_margin=0.2)
    terms = _measure(Objective(_recipe(loss_options={"neg_margin": 0.2}), classes=4))
    halves = torch.Generator().manual_seed(7)
    assert torch.equal(terms.dml, loss(embeddings, LABELS))
    assert torch.equal(terms.xml, cross_batch_loss(histograms, embeddings, LABELS, loss, generator=halves))
    torch.testing.assert_close(terms.total, 0.7 * terms.dml + 0.3 * terms.xml)


def test_without_xml_nothing_is_fitted() -> None:
    terms = _measure(Objective(_recipe(xml_weight=0), classes=4), weight=0.0)
    assert terms.xml == 0
    assert terms.total is terms.dml


def test_the_memory_counts_from_its_start_and_never_holds_the_batch_itself() -> None:
    objective = Objective(_recipe(memory_batches=2, memory_start=1, memory_weight=0.5), classes=4)
    loss = objective.loss
    batches = [_batch(seed)[0] for seed in range(5)]
    told = [_measure(objective, step=step, seed=step).dml for step in range(5)]
    for step, embeddings in enumerate(batches):
        expected = loss(embeddings, LABELS)
        held = batches[max(1, step - 2) : step]
        if step > 1:
            expected = expected + 0.5 * loss.against(
                embeddings, LABELS, torch.cat(held), LABELS.repeat(len(held))
            )
        torch.testing.assert_close(told[step], expected)
    objective.zero_grad()
    _measure(objective, step=9).total.backward()  # type: ignore[no-untyped-call]  # no gradient flows into the memory
    assert objective.memory is not None
    assert not objective.memory.contents()[0].requires_grad


def test_the_recursion_expresses_a_half_by_the_other_half_and_all_before() -> None:
    recipe = _recipe(xml_prototypes="recursion", recursion_decay=0.8, ridge=0.1)
    objective = Objective(recipe, classes=4)
    past = start(3, 5, ridge=0.1)
    for seed in range(3):
        embeddings, histograms = _batch(seed)
        first, second = split_classes(LABELS, torch.Generator().manual_seed(7))
        expected = torch.zeros(())
        for mine, other in ((first, second), (second, first)):
            fitted = update(past, histograms[other], embeddings[other], decay=0.8, ridge=0.1).prototypes
            expected = expected + objective.loss(histograms[mine] @ fitted.T, LABELS[mine])
        terms = _measure(objective, seed=seed)
        torch.testing.assert_close(terms.xml, expected)
        terms.total.backward()  # type: ignore[no-untyped-call]
        past = update(past, histograms.detach(), embeddings.detach(), decay=0.8, ridge=0.1)


def test_mixed_examples_add_their_weighted_loss() -> None:
    recipe = _recipe(
        loss="multi_similarity", loss_options={"alpha": 1.5}, mixing="embedding", mixing_weight=0.7
    )
    objective = Objective(recipe, classes=4)
    embeddings, _ = _batch()
    pairs: Pairs = draw_pairs(LABELS, alpha=2.0, generator=torch.Generator().manual_seed(0))
    mixed = mix(embeddings, pairs)
    plain, more = _measure(objective), _measure(objective, mixed=(mixed, pairs))
    added = mixed_loss(embeddings, LABELS, mixed, pairs, alpha=1.5)
    assert added > 0
    torch.testing.assert_close(more.dml - plain.dml, 0.7 * added)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_batches": 3},
        {"xml_prototypes": "recursion"},
        {"loss": "proxy_anchor"},
        {"loss": "libc", "loss_options": {"heads": 1}},
    ],
)
def test_what_it_remembers_is_restored(settings: dict[str, Any]) -> None:
    recipe = _recipe(**settings)
    ours = Objective(recipe, classes=4)
    for seed in range(4):
        _measure(ours, seed=seed)
    theirs = Objective(recipe, classes=4)
    load_module(theirs, ours.state_dict(), source="memory")  # type: ignore[arg-type]
    assert torch.equal(_measure(ours, seed=9).total, _measure(theirs, seed=9).total)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "proxy_anchor", "memory_batches": 2}, "compares no pairs that a memory"),
        ({"loss": "contrastive", "mixing": "input"}, "mixed examples are defined for the multi_similarity"),
        ({"loss": "contrastve"}, "did you mean 'contrastive'"),
        ({"loss_options": {"neg_margn": 1.0}}, "did you mean 'neg_margin'"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        Objective(_recipe(**settings), classes=4)
