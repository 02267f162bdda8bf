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
from training.method import cross_batch
from training.method.prototypes import fit_prototypes
from training.method.recursion import Past
from training.recipes.recipe import Recipe

__all__ = ["Memory", "Objective", "Terms"]


class Terms(NamedTuple):
    """A step's loss and its parts, scalars."""

    total: Tensor
    dml: Tensor
    xml: Tensor


class Objective(nn.Module):
    """Losses on whole batches; memory and recursion are buffers, so that a checkpoint holds them."""

    def __init__(self, recipe: Recipe, *, classes: int) -> None:
        super().__init__()
        self._recipe = recipe
        options = recipe.loss_options
        self.loss = build_loss(recipe.loss, classes=classes, dimension=recipe.dimension, **options)
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
        """Measure a batch, raw embeddings (B, d), histograms (B, m) and labels (B,), and remember it.

        The `step` counts from 0, `weight` is λ, and `halves` draws the halves of the XML term. There may be
        `mixed` embeddings (M, d) with what they are mixed of, and `detached` histograms (B, m) to rebuild
        from, whose gradient moves the codebook alone.
        """
        recipe, dml = self._recipe, self.loss(embeddings, labels)
        if self.memory is not None and step >= recipe.memory_start:
            references, reference_labels = self.memory.contents()  # none of which is of the batch
            if len(references):
                against = self.loss.against(embeddings, labels, references, reference_labels)
                dml = dml + recipe.memory_weight * against
            self.memory.push(embeddings, labels)
        if mixed is not None:
            options: dict[str, Any] = dict(recipe.loss_options)
            options.pop("epsilon", None)  # of the miner, which mixed examples have none of
            dml = dml + recipe.mixing_weight * mixed_loss(embeddings, labels, *mixed, **options)
        total, xml = dml, dml.new_zeros(())
        if recipe.xml_weight:
            xml = self._xml(embeddings, histograms, labels, halves)
            total = (1 - weight) * dml + weight * xml
        targets = cross_batch.fit_targets(embeddings.detach(), recipe.fit_on)
        if self.past is not None:
            self.past.push(histograms.detach(), targets, labels % self._kinds)
        if detached is not None:  # the mean of ‖Vz − y‖² over the batch that V is fitted to (eq. 2.8)
            targets = targets.float()
            fitted = fit_prototypes(detached, targets, ridge=recipe.ridge, ridge_on=recipe.ridge_on)
            rebuilt = (detached @ fitted.T - targets).square().sum(dim=1).mean()
            total = total + recipe.reconstruction_weight * rebuilt
        return Terms(total, dml, xml)

    def watch(self, *batch: Tensor, leaves: Sequence[Tensor], weight: float, seed: int) -> dict[str, float]:
        """Measure what the XML term makes of a batch, as `forward` takes it, that is not remembered yet.

        Gives what `watch_term` does, and with XML `xml_gradient_share`: its gradient by the `leaves` over
        that of the loss on the batch's own embeddings.
        """
        embeddings, histograms, labels = batch
        kinds = labels % self._kinds
        first, _ = cross_batch.split_classes(kinds, torch.Generator().manual_seed(seed))
        measured = histograms.detach(), embeddings.detach(), labels, first
        told = cross_batch.watch_term(*measured, kinds=kinds, **self._fit)
        if told and self._recipe.xml_weight:
            xml = self._xml(embeddings, histograms, labels, torch.Generator().manual_seed(seed))
            pull = cross_batch.gradient_share(self.loss(embeddings, labels), xml, leaves, weight=weight)
            told |= {"xml_gradient_share": pull} if math.isfinite(pull) else {}
        return told

    def _xml(self, embeddings: Tensor, histograms: Tensor, labels: Tensor, halves: torch.Generator) -> Tensor:
        """L_XML (eq. 2.11), by prototypes of the batch alone or of all batches so far."""
        fit = self._fit | {"generator": halves, "kinds": labels % self._kinds}
        return cross_batch.cross_batch_loss(histograms, embeddings, labels, self.loss, **fit)


class Memory(nn.Module):
    """Cross-batch memory: a ring of the last embeddings and labels; the oldest make room for the newest.

    Wang, Zhang, Huang and Scott, "Cross-Batch Memory for Embedding Learning", CVPR 2020: embeddings drift
    slowly once training has settled, so those of past batches still serve as references.
    """

    embeddings: Tensor  # float32 (size, d)
    labels: Tensor  # int64 (size,)
    position: Tensor  # int64 (), where the next embedding goes
    filled: Tensor  # int64 (), how many rows hold one

    def __init__(self, dimension: int, size: int) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, dimension))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, embeddings: Tensor, labels: Tensor) -> None:
        """Add a batch, raw (B, d), in its order; of one larger than the memory the last rows stay."""
        size, count = len(self.labels), len(labels)
        kept = min(count, size)
        # Places are counted on the device: reading the position back would wait for it.
        places = (self.position + torch.arange(count - kept, count, device=self.labels.device)) % size
        self.embeddings[places] = embeddings[count - kept :].to(self.embeddings)
        self.labels[places] = labels[count - kept :].to(self.labels)
        self.position.add_(count).remainder_(size)
        self.filled.add_(count).clamp_(max=size)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Give embeddings (R, d) and labels (R,), in no order of time: views, which the next push changes."""
        filled = int(self.filled)
        return self.embeddings[:filled], self.labels[:filled]
