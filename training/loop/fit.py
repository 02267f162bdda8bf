"""The training loop: epochs of batches, validation, a checkpoint and a line of metrics after each epoch.

After a cut it goes on from the last checkpoint: every random draw follows from the recipe's seed, the epoch
and the number of the draw, so that a resumed run gives the same weights, bit for bit, as one that was not
cut. Several processes (`training.loop.processes`) run it side by side, each on its rows of every batch.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from serving.errors import BadSetting, CrossbatchError
from serving.progress import progress
from training.data.augment import Augmentation, TrainingSet
from training.data.feature_cache import FeatureSet, feature_batches
from training.data.pictures import Pictures, QuarterTurns, embed_pictures
from training.data.sampler import PKSampler
from training.evaluation.metrics import retrieval_metrics
from training.loop.logbook import Logbook, curves, dead_note
from training.loop.processes import gather_rows, gather_shares, mean_gradients, share
from training.loop.trainee import Trainee, clip, freeze_batchnorm, rate_factor, xml_weight
from training.losses.metrix import embed_mixed
from training.network.embedder import Features, embedder_function
from training.recipes.recipe import Recipe

__all__ = ["fit"]

_log = logging.getLogger(__name__)

_Source = Pictures | QuarterTurns | FeatureSet
_Batches = Iterable[tuple[Tensor, Tensor]]
_SUMS = ("loss", "dml", "xml", "gradient_norm")  # what each step tells; an epoch's row holds the means


def fit(
    recipe: Recipe,
    trainee: Trainee,
    pictures: Pictures | FeatureSet,
    validation: Pictures | FeatureSet | None,
    folder: Path,
    record: dict[str, Any],
    *,
    fresh: bool,
    tensorboard: bool = False,
) -> Logbook:
    """Run the epochs that are left, saving after each; `BadSetting` if the loss ceases to be a number.

    `validation` are held-out classes; without, the last epoch is kept. The `record` is brought up to date.
    A run that is not `fresh` goes on from its last checkpoint. The logbook's `best` has the `epoch` kept (0
    is the start) and its metrics.
    """
    fabric = trainee.fabric
    source: _Source = pictures
    if recipe.quarter_turns and isinstance(pictures, Pictures):
        source = QuarterTurns(pictures)
    sampler = PKSampler(
        source.labels,
        classes_per_batch=recipe.classes_per_batch,
        images_per_class=recipe.images_per_class,
        batches=recipe.batches_per_epoch,
        seed=recipe.seed,
    )
    logbook = Logbook(trainee, recipe, folder, record)
    if fresh:
        logbook.end_epoch({"epoch": 0, "steps": 0}, _validate(trainee, validation))
    else:
        logbook.restore()
    board = folder / "tensorboard" if tensorboard and fabric.is_global_zero else None
    with curves(board, logbook.history) as draw:
        while not logbook.finished:
            epoch, started = logbook.epochs_done, time.monotonic()
            sampler.epoch = epoch
            batches = _batches(source, sampler, recipe, epoch, fabric)
            row = {
                "epoch": epoch + 1,
                "steps": (epoch + 1) * len(sampler),
                **_run_epoch(trainee, batches, recipe, epoch, steps=len(sampler)),
                "learning_rate": trainee.optimizer.param_groups[0]["lr"],
                "seconds": round(time.monotonic() - started, 2),
            }
            note, *before = (dead_note([each], recipe) for each in (row, *logbook.history))
            if note and not any(before) and fabric.is_global_zero:
                _log.warning("%s", note)
            due = (epoch + 1) % recipe.evaluate_every == 0 or epoch + 1 == recipe.epochs
            logbook.end_epoch(row, _validate(trainee, validation if due else None))
            draw(row)
    return logbook


def _batches(source: _Source, sampler: PKSampler, recipe: Recipe, epoch: int, fabric: Fabric) -> _Batches:
    """Deal out one epoch, counted from 0: this process's rows of each batch."""
    if isinstance(source, FeatureSet):
        return feature_batches(source, sampler, recipe, epoch=epoch, mine=lambda rows: share(rows, fabric))
    draw = itertools.count()  # numbered as one process would
    return DataLoader(
        TrainingSet(source, Augmentation(recipe), seed=recipe.seed, epoch=epoch),
        batch_sampler=[share([(index, next(draw)) for index in batch], fabric) for batch in sampler],
        num_workers=recipe.workers,
        generator=Generator(),  # only seeds workers, and must not draw from the global one
    )


def _run_epoch(
    trainee: Trainee, batches: _Batches, recipe: Recipe, epoch: int, *, steps: int
) -> dict[str, float]:
    """Step through one epoch, from 0; gives means of `_SUMS`, `watch` of the last batch, seconds `waited`."""
    embedder, objective, fabric = trainee.embedder, trainee.objective, trainee.fabric
    optimizer, mapped = trainee.optimizer, recipe.caches_features
    total = recipe.epochs * steps
    torch.manual_seed(_seed(recipe, epoch, 0) + fabric.global_rank)  # for backbones that drop out
    halves, pairing = (Generator().manual_seed(_seed(recipe, epoch, use)) for use in (1, 2))
    resting = epoch < recipe.freeze_epochs
    embedder.train()
    freeze_batchnorm(embedder, whole=recipe.freeze_batchnorm or resting)
    watched: dict[str, float] = {}
    sums, counts = torch.zeros(2, len(_SUMS), dtype=torch.float64)
    waited, since = 0.0, time.monotonic()
    label = f"Epoch {epoch + 1}/{recipe.epochs}"
    for batch, (pixels, names) in enumerate(progress(_drawn(batches), label, total=steps, unit="batch")):
        waited += time.monotonic() - since
        step = epoch * steps + batch
        weight = xml_weight(step, total, recipe)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate_factor(step, total, recipe, per_epoch=steps)
        # pixels uint8 (B, S, S, 3) or maps (B, C, k, 1), names int64 (B,), both this process's rows
        images = embedder.normalise(pixels.to(trainee.fabric.device), mapped=mapped)
        labels = names.to(trainee.fabric.device)
        features: Features = trainee.forward(images, mapped=mapped)
        mixed = embed_mixed(
            images, features.embeddings, labels, recipe, trainee.forward, embedder.backbone, pairing
        )
        rows = tuple(gather_rows(each, fabric) for each in (features.embeddings, features.histograms, labels))
        detached = None if features.detached is None else gather_rows(features.detached, fabric)
        if batch + 1 == steps and recipe.learns_prototypes:  # before the objective remembers the batch
            watched = _watch(trainee, features, rows[2], weight=weight, seed=_seed(recipe, epoch, 3))
        terms = objective(*rows, step=step, weight=weight, halves=halves, mixed=mixed, detached=detached)
        fabric.backward(terms.total)
        mean_gradients(objective, fabric)
        if resting:
            embedder.backbone.zero_grad()  # which the optimiser then passes over
        precision = fabric.strategy.precision
        precision.unscale_gradients(getattr(optimizer, "optimizer", optimizer))  # of fp16
        length = clip(optimizer, embedder.codebook, norm=recipe.clip_norm, value=recipe.clip_value)
        # at once, and as float64 on the CPU, for MPS has none of its own
        told = torch.stack([value.detach().float() for value in (*terms, length)]).cpu().double()
        scale = precision.state_dict().get("scale")
        _check_finite(told, scale=scale, epoch=epoch, batch=batch, step=step)
        optimizer.step()
        optimizer.zero_grad()
        if trainee.average:
            trainee.average.update_parameters(embedder)
        counted = torch.isfinite(told)  # all but the gradient of a step that fp16 left out
        sums += told.where(counted, 0)
        counts += counted
        since = time.monotonic()
    means = dict(zip(_SUMS, (sums / counts.clamp_min(1)).tolist(), strict=True))
    return means | watched | {"waited": round(waited, 2)}


def _drawn(batches: _Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw batches; what goes wrong in a process of the loader is told as if it were here."""
    try:
        yield from batches
    except CrossbatchError as error:  # torch puts the whole trace of the process around the sentence
        name = f"{type(error).__module__}.{type(error).__name__}: "
        raise type(error)(str(error).strip().splitlines()[-1].removeprefix(name)) from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise BadSetting(
            "a process that augments images has been killed, for want of memory perhaps: set workers lower"
        ) from error


def _watch(
    trainee: Trainee, features: Features, labels: Tensor, *, weight: float, seed: int
) -> dict[str, float]:
    """Measure the XML term on a batch and its gradient at what the head puts out, by halves of their own."""
    locations = gather_rows(features.locations.detach(), trainee.fabric).requires_grad_()
    leaves, embeddings = [locations], locations.mean(dim=1)
    if trainee.embedder.pooling != "gap":  # which is no function of the locations
        embeddings = gather_rows(features.embeddings.detach(), trainee.fabric).requires_grad_()
        leaves.append(embeddings)
    histograms = trainee.embedder.histogram(locations)
    return trainee.objective.watch(embeddings, histograms, labels, leaves=leaves, weight=weight, seed=seed)


def _check_finite(told: Tensor, *, scale: float | None, epoch: int, batch: int, step: int) -> None:
    """Stop before a step that would spoil the weights; fp16 may overflow until its scale is below 1."""
    loss, *_, norm = told.tolist()
    overflown = scale is not None and scale >= 1 and bool(torch.isfinite(told[:-1]).all())
    if not torch.isfinite(told).all() and not overflown:
        raise BadSetting(
            f"the loss is {loss:.4g} and its gradient's length {norm:.4g} at step {step + 1}"
            f" (epoch {epoch + 1}, batch {batch + 1}): lower the learning rates or set clip_norm; the"
            f" checkpoint of epoch {epoch} is kept"
        )


def _validate(trainee: Trainee, validation: Pictures | FeatureSet | None) -> dict[str, Any] | None:
    """Measure the held-out classes: each process embeds its share, the first one measures."""
    if validation is None:
        return None
    fabric, total = trainee.fabric, len(validation)
    mapped = isinstance(validation, FeatureSet)
    embed = embedder_function(trainee.eval_model, trainee.fabric.device, mapped=mapped)
    mine = validation.share(fabric.global_rank, fabric.world_size)
    found = torch.from_numpy(embed_pictures(embed, mine, label="Validating"))
    embeddings = gather_shares(found, total, fabric)
    measured = retrieval_metrics(embeddings, validation.labels).told() if fabric.is_global_zero else None
    return fabric.broadcast(measured) if fabric.world_size > 1 else measured


def _seed(recipe: Recipe, epoch: int, use: int) -> int:
    return int(np.random.SeedSequence((recipe.seed, epoch, use)).generate_state(1)[0])
