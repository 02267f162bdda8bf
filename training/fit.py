"""The training loop: epochs of P x K batches, each followed by an evaluation and a checkpoint.

Every random draw depends on the recipe's seed, the epoch and the place in it alone, so that no state of a
random generator is saved, and a run cut anywhere goes on from its last whole epoch as if it had not been cut.
"""

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from serving.errors import BadSetting
from serving.progress import progress
from training.augment import Augmentation
from training.cross_batch import cross_batch_loss
from training.dataset import Draws, Pictures, QuarterTurns, TrainingSet
from training.embedding import embed_pictures, embedder_function, measure_retrieval
from training.logbook import Logbook
from training.optimizer import freeze_batchnorm, rate_factor
from training.recipe import Recipe
from training.run import LAST
from training.sampler import PKSampler
from training.trainee import Trainee

__all__ = ["fit"]

_SUMS = ("loss", "dml", "xml", "gradient_norm")
"""What each step tells, in this order; an epoch's row holds the means."""


def fit(
    recipe: Recipe,
    trainee: Trainee,
    source: Pictures | QuarterTurns,
    validation: Pictures | None,
    folder: Path,
    record: dict[str, Any],
) -> dict[str, Any]:
    """Run the epochs that are left, saving after each.

    Args:
        recipe: All settings.
        trainee: What `start_trainee` built of the recipe.
        source: Training images, of any size.
        validation: Images of held-out classes, S x S; None keeps the last epoch.
        folder: The run's, which exists.
        record: The run's; its `metrics` are brought up to date.

    Returns:
        `epoch`, counted from 1 (0 is the start), and with validation the metrics of the epoch that is kept.

    Raises:
        BadSetting: If the loss ceases to be a number.
        CrossbatchError: If a checkpoint cannot be written or read.
    """
    sampler = PKSampler(
        source.labels,
        classes_per_batch=recipe.classes_per_batch,
        images_per_class=recipe.images_per_class,
        batches=recipe.batches_per_epoch,
        seed=recipe.seed,
    )
    augmentation = Augmentation(recipe)
    logbook = Logbook(trainee.modules, trainee.optimizer, folder=folder, record=record)
    if (folder / LAST).is_file():
        logbook.restore()
    else:
        logbook.end_epoch({"epoch": 0, "steps": 0}, trainee.judged, _validate(trainee, validation))
    for epoch in range(logbook.epochs_done, recipe.epochs):
        started = time.monotonic()
        sampler.set_epoch(epoch)
        batches = DataLoader(
            TrainingSet(source, augmentation, seed=recipe.seed, epoch=epoch),
            batch_sampler=Draws(sampler),
            num_workers=recipe.workers,
            generator=torch.Generator(),  # which only seeds workers, and must not draw from the global one
        )
        means = _run_epoch(trainee, batches, recipe, epoch)
        row = {
            "epoch": epoch + 1,
            "steps": (epoch + 1) * len(sampler),
            **means,
            "learning_rate": trainee.optimizer.param_groups[0]["lr"],
            "seconds": round(time.monotonic() - started, 2),
        }
        due = (epoch + 1) % recipe.evaluate_every == 0 or epoch + 1 == recipe.epochs
        logbook.end_epoch(row, trainee.judged, _validate(trainee, validation if due else None))
    return logbook.best


def _run_epoch(
    trainee: Trainee, batches: DataLoader[tuple[Tensor, int]], recipe: Recipe, epoch: int
) -> dict[str, float]:
    """Step through one epoch, counted from 0; gives the means of `_SUMS`."""
    embedder, optimizer = trainee.embedder, trainee.optimizer
    steps = len(batches)
    torch.manual_seed(_seed(recipe, epoch, 0))  # for backbones that drop out
    halves = torch.Generator().manual_seed(_seed(recipe, epoch, 1))
    embedder.train()
    freeze_batchnorm(embedder, whole=recipe.freeze_batchnorm)
    sums = torch.zeros(len(_SUMS), dtype=torch.float64)
    label = f"Epoch {epoch + 1}/{recipe.epochs}"
    for batch, (pixels, names) in enumerate(progress(batches, label, total=steps, unit="batch")):
        step = epoch * steps + batch
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate_factor(step, recipe.epochs * steps, recipe)
        # pixels uint8 (B, S, S, 3), names int64 (B,)
        labels = names.to(trainee.device)
        features = trainee.forward(embedder.normalise(pixels.to(trainee.device)))
        dml = trainee.loss(features.embeddings, labels)
        xml = _cross_batch(features.histograms, features.embeddings, labels, trainee, recipe, halves)
        total = (1 - recipe.xml_weight) * dml + recipe.xml_weight * xml
        trainee.fabric.backward(total)
        told = _to_host((total, dml, xml, _clip(optimizer, recipe.clip_norm)))
        _check_finite(told, epoch=epoch, batch=batch, step=step)
        optimizer.step()
        optimizer.zero_grad()
        if trainee.average:
            trainee.average.update_parameters(embedder)
        sums += told
    return dict(zip(_SUMS, (sums / steps).tolist(), strict=True))


def _cross_batch(
    histograms: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    trainee: Trainee,
    recipe: Recipe,
    generator: torch.Generator,
) -> Tensor:
    """L_XML, or a plain zero when it has no weight."""
    if recipe.xml_weight == 0:
        return torch.zeros((), device=embeddings.device)
    return cross_batch_loss(
        histograms,
        embeddings,
        labels,
        trainee.loss,
        ridge=recipe.ridge,
        generator=generator,
        fit_on=recipe.fit_on,
    )


def _clip(optimizer: Optimizer, limit: float) -> Tensor:
    """Shorten the whole gradient to `limit` (0: leave it); returns its length before."""
    parameters: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    return nn.utils.clip_grad_norm_(parameters, limit or math.inf)


def _to_host(values: Sequence[Tensor]) -> Tensor:
    """Fetch scalars from their device at once, as float64 (k,) on the CPU; MPS has no float64 of its own."""
    return torch.stack([value.detach() for value in values]).cpu().double()


def _check_finite(told: Tensor, *, epoch: int, batch: int, step: int) -> None:
    """Stop before a step that would spoil the weights."""
    if not torch.isfinite(told).all():
        loss, *_, norm = told.tolist()
        raise BadSetting(
            f"the loss is {loss:.4g} and its gradient's length {norm:.4g} at step {step + 1}"
            f" (epoch {epoch + 1}, batch {batch + 1}): lower the learning rates or set clip_norm; the"
            f" checkpoint of epoch {epoch} is kept"
        )


def _validate(trainee: Trainee, validation: Pictures | None) -> dict[str, Any] | None:
    if validation is None:
        return None
    embed = embedder_function(trainee.judged, trainee.device)
    return measure_retrieval(embed_pictures(embed, validation, label="Validating"), validation.labels)


def _seed(recipe: Recipe, epoch: int, use: int) -> int:
    return int(np.random.SeedSequence((recipe.seed, epoch, use)).generate_state(1)[0])
