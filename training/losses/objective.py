"""The objective: what a training step minimises, with all that it remembers from one step to the next.

L = (1 − λ) L_DML + λ L_XML, where L_DML is the loss on the batch, on pairs of batch and memory (XBM) and on
mixed examples (Metrix), as far as the recipe has them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from serving.errors import BadSetting
from training.losses.loss import build_loss
from training.losses.metrix import Pairs, mixed_loss
from training.losses.pairwise import Memory
from training.method.cross_batch import (
    cross_batch_loss,
    fit_targets,
    gradient_share,
    split_classes,
    watch_term,
)
from training.method.prototypes import fit_prototypes
from training.method.recursion import Past
from training.recipes.recipe import Recipe

__all__ = ["Objective", "Terms"]


class Terms(NamedTuple):
    """A step's loss and its parts, scalars."""

    total: Tensor
    dml: Tensor
    xml: Tensor


class Objective(nn.Module):
    """Losses on whole batches; memory and recursion are buffers, so that a checkpoint holds them.

    An unknown setting of the loss, or a loss that cannot be used with memory or mixing, is a `BadSetting`.
    """

    def __init__(self, recipe: Recipe, *, classes: int) -> None:
        super().__init__()
        self._recipe = recipe
        self.loss = build_loss(
            recipe.loss, classes=classes, dimension=recipe.dimension, **recipe.loss_options
        )
        if recipe.memory_batches and not self.loss.on_pairs:
            raise BadSetting(
                f"memory_batches is {recipe.memory_batches}, but the {recipe.loss} loss compares no pairs"
                " that a memory could add to: set it to 0, or choose contrastive, triplet or multi_similarity"
            )
        if recipe.mixing != "none" and recipe.loss != "multi_similarity":
            raise BadSetting(
                f"mixing is {recipe.mixing}, but mixed examples are defined for the multi_similarity loss and"
                f" not for {recipe.loss}: set mixing to none, or change the loss"
            )
        size = recipe.memory_batches * recipe.batch_size
        self.memory = Memory(recipe.dimension, size) if size else None
        # with quarter_turns, labels are class + turn * kinds, and the turns of a class are never parted
        self._kinds = classes // 4 if recipe.quarter_turns else classes
        self.past: Past | None = None
        if recipe.xml_weight and recipe.xml_prototypes == "recursion":
            self.past = Past(self._kinds, recipe.prototypes, recipe.dimension, decay=recipe.recursion_decay)
        self._fit: dict[str, Any] = {
            "ridge": recipe.ridge, "ridge_on": recipe.ridge_on, "fit_on": recipe.fit_on, "past": self.past,
        }  # fmt: skip

    def forward(
        self,
        embeddings: Tensor,
        histograms: Tensor,
        labels: Tensor,
        *,
        step: int,
        weight: float,
        halves: torch.Generator,
        mixed: tuple[Tensor, Pairs] | None = None,
        detached: Tensor | None = None,
    ) -> Terms:
        """Measure a batch, and remember it.

        Args:
            embeddings: Raw, float (B, d).
            histograms: float (B, m), each row sums to one.
            labels: int64 (B,).
            step: Counted from 0 over the whole training.
            weight: λ at this step.
            halves: Draws the halves of the XML term.
            mixed: Embeddings of mixed examples, float (M, d), and what they are mixed of.
            detached: Histograms whose gradient moves the codebook alone, float (B, m); they are rebuilt from.
        """
        dml = self.loss(embeddings, labels)
        if self.memory is not None and step >= self._recipe.memory_start:
            dml = dml + self._recipe.memory_weight * self._against(self.memory, embeddings, labels)
        if mixed is not None:
            options: dict[str, Any] = dict(self._recipe.loss_options)
            options.pop("epsilon", None)  # of the miner, which mixed examples have none of
            dml = dml + self._recipe.mixing_weight * mixed_loss(embeddings, labels, *mixed, **options)
        total, xml = dml, dml.new_zeros(())
        if self._recipe.xml_weight:
            xml = self._xml(embeddings, histograms, labels, halves)
            total = (1 - weight) * dml + weight * xml
        if self.past is not None:
            targets = fit_targets(embeddings.detach(), self._recipe.fit_on)
            self.past.push(histograms.detach(), targets, labels % self._kinds)
        if detached is not None:
            total = total + self._recipe.reconstruction_weight * self._reconstruction(detached, embeddings)
        return Terms(total, dml, xml)

    def watch(
        self,
        embeddings: Tensor,
        histograms: Tensor,
        labels: Tensor,
        *,
        leaves: Sequence[Tensor],
        weight: float,
        seed: int,
    ) -> dict[str, float]:
        """Measure what the XML term makes of a batch, as `forward` takes it, that is not remembered yet.

        Returns:
            What `watch_term` gives, and with XML `xml_gradient_share`: its gradient by the `leaves` over that
            of the loss on the batch's own embeddings, where that has one.
        """
        kinds = labels % self._kinds
        first, _ = split_classes(kinds, torch.Generator().manual_seed(seed))
        told = watch_term(histograms.detach(), embeddings.detach(), labels, first, kinds=kinds, **self._fit)
        if told and self._recipe.xml_weight:
            xml = self._xml(embeddings, histograms, labels, torch.Generator().manual_seed(seed))
            pull = gradient_share(self.loss(embeddings, labels), xml, leaves, weight=weight)
            told |= {"xml_gradient_share": pull} if math.isfinite(pull) else {}
        return told

    def _against(self, memory: Memory, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compare a batch with what the memory holds, none of which is of the batch; then put it in."""
        references, reference_labels = memory.contents()
        loss = embeddings.new_zeros(())
        if len(references):
            loss = self.loss.against(embeddings, labels, references, reference_labels)
        memory.push(embeddings, labels)
        return loss

    def _xml(self, embeddings: Tensor, histograms: Tensor, labels: Tensor, halves: torch.Generator) -> Tensor:
        """L_XML (eq. 2.11), by prototypes of the batch alone or of all batches so far."""
        kinds = labels % self._kinds
        return cross_batch_loss(
            histograms, embeddings, labels, self.loss, generator=halves, kinds=kinds, **self._fit
        )

    def _reconstruction(self, histograms: Tensor, embeddings: Tensor) -> Tensor:
        """Mean of ‖Vz − y‖² over the batch that V is fitted to (eq. 2.8); embeddings get no gradient."""
        recipe = self._recipe
        targets = fit_targets(embeddings.detach(), recipe.fit_on).float()
        fitted = fit_prototypes(histograms, targets, ridge=recipe.ridge, ridge_on=recipe.ridge_on)
        return (histograms @ fitted.T - targets).square().sum(dim=1).mean()
