"""The objective: what a training step minimises, with all that it remembers from one step to the next.

L = (1 − λ) L_DML + λ L_XML, where L_DML is the loss on the batch, on pairs of batch and memory (XBM) and on
mixed examples (Metrix), as far as the recipe has them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting
from training.cross_batch import cross_batch_loss
from training.loss import build_loss
from training.memory import Memory
from training.metrix import Pairs, mixed_loss
from training.precision import full_precision
from training.recipe import Recipe
from training.recursion import Fit, start, update

__all__ = ["Objective", "Terms"]


class Terms(NamedTuple):
    """A step's loss and its parts, scalars."""

    total: Tensor
    dml: Tensor
    xml: Tensor


class Objective(nn.Module):
    """Losses on whole batches; memory and recursion are buffers, so that a checkpoint holds them.

    Args:
        recipe: All settings.
        classes: Number of training classes.

    Raises:
        BadSetting: If a setting of the loss is unknown, or the loss cannot be used with memory or mixing.
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
        self._past_prototypes: Tensor
        self._past_gram: Tensor
        if recipe.xml_weight and recipe.xml_prototypes == "recursion":
            past = start(recipe.prototypes, recipe.dimension, ridge=recipe.ridge)
            self.register_buffer("_past_prototypes", past.prototypes)  # V, (d, m)
            self.register_buffer("_past_gram", past.gram)  # R, (m, m)

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
        """
        dml = self.loss(embeddings, labels)
        if self.memory is not None and step >= self._recipe.memory_start:
            dml = dml + self._recipe.memory_weight * self._against(self.memory, embeddings, labels)
        if mixed is not None:
            dml = dml + self._recipe.mixing_weight * mixed_loss(
                embeddings, labels, *mixed, **self._options_of_mixing()
            )
        if self._recipe.xml_weight == 0:
            return Terms(dml, dml, dml.new_zeros(()))
        xml = self._cross_batch(embeddings, histograms, labels, halves)
        return Terms((1 - weight) * dml + weight * xml, dml, xml)

    def _against(self, memory: Memory, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compare a batch with what the memory holds, none of which is of the batch; then put it in."""
        references, reference_labels = memory.contents()
        loss = embeddings.new_zeros(())
        if len(references):
            loss = self.loss.against(embeddings, labels, references, reference_labels)
        memory.push(embeddings, labels)
        return loss

    def _cross_batch(
        self, embeddings: Tensor, histograms: Tensor, labels: Tensor, halves: torch.Generator
    ) -> Tensor:
        """L_XML (eq. 2.11), by prototypes of the batch alone or of the recursion."""
        recipe = self._recipe
        recursive = recipe.xml_prototypes == "recursion"
        loss = cross_batch_loss(
            histograms,
            embeddings,
            labels,
            self.loss,
            ridge=recipe.ridge,
            generator=halves,
            fit_on=recipe.fit_on,
            past=Fit(self._past_prototypes, self._past_gram) if recursive else None,
            decay=recipe.recursion_decay,
        )
        if recursive:
            self._remember(embeddings.detach(), histograms.detach())
        return loss

    @torch.no_grad()
    @full_precision
    def _remember(self, embeddings: Tensor, histograms: Tensor) -> None:
        if self._recipe.fit_on == "unit":
            embeddings = functional.normalize(embeddings, dim=1)
        now = update(
            Fit(self._past_prototypes, self._past_gram),
            histograms,
            embeddings,
            decay=self._recipe.recursion_decay,
            ridge=self._recipe.ridge,
        )
        self._past_prototypes.copy_(now.prototypes)
        self._past_gram.copy_(now.gram)

    def _options_of_mixing(self) -> dict[str, Any]:
        """Give the options of multi-similarity that its form for mixed examples has too."""
        return {name: value for name, value in self._recipe.loss_options.items() if name != "epsilon"}
