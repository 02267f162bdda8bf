"""The training loop: epochs of P x K batches, each followed by an evaluation and a checkpoint.

Every random draw depends on the recipe's seed, the epoch and the place in it alone, so that no state of a
random generator is saved, and a run cut anywhere goes on from its last whole epoch as if it had not been cut.
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from serving.errors import BadSetting
from serving.progress import progress
from training.augment import Augmentation
from training.checkpoint import (
    load_checkpoint,
    load_module,
    load_optimizer,
    pack_optimizer,
    prefixed,
    save_checkpoint,
    unprefixed,
)
from training.cross_batch import cross_batch_loss
from training.dataset import Draws, Pictures, TrainingSet, viewing_decoder
from training.embedder import Embedder, build_embedder
from training.embedding import embed_pictures, embedder_function, measure_retrieval, pooled_function
from training.head_init import closed_form_head
from training.loss import MetricLoss, build_loss
from training.optimizer import average_weights, build_optimizer, freeze_batchnorm, rate_factor
from training.recipe import Recipe
from training.run import BEST, LAST, write_metrics, write_record
from training.sampler import PKSampler

__all__ = ["fit"]


def fit(
    recipe: Recipe,
    pictures: Pictures,
    validation: Pictures | None,
    folder: Path,
    record: dict[str, Any],
    *,
    device: str = "auto",
) -> dict[str, Any]:
    """Run the epochs that are left, saving after each.

    Args:
        recipe: All settings.
        pictures: Training images, of any size.
        validation: Images of held-out classes, S x S; None keeps the last epoch.
        folder: The run's, which exists.
        record: The run's; its `metrics` are brought up to date.
        device: `auto`, or a device by Lightning's name.

    Returns:
        `epoch`, counted from 1 (0 is the start), and with validation the metrics of the epoch that is kept.

    Raises:
        BadSetting: If the device is not there, or the loss ceases to be a number.
        CrossbatchError: If a checkpoint cannot be written or read.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    fabric = _fabric(device, recipe.precision)
    embedder = build_embedder(recipe)
    embedder.backbone.freeze(recipe.freeze_stages)
    embedder.to(fabric.device).to(memory_format=torch.channels_last)
    loss = build_loss(
        recipe.loss, classes=len(pictures.classes), dimension=recipe.dimension, **recipe.loss_options
    ).to(fabric.device)
    if recipe.head_init != "random" and not (folder / LAST).is_file():
        _start_head(embedder, pictures, recipe)
    average = average_weights(embedder, recipe.ema_decay) if recipe.ema_decay else None
    judged: Embedder = average.module if average else embedder  # type: ignore[assignment]
    model, optimizer = fabric.setup(embedder, build_optimizer(embedder, loss, recipe))
    sampler = PKSampler(
        pictures.labels,
        classes_per_batch=recipe.classes_per_batch,
        images_per_class=recipe.images_per_class,
        batches=recipe.batches_per_epoch,
        seed=recipe.seed,
    )
    augmentation = Augmentation(recipe)
    steps = recipe.epochs * len(sampler)

    state = _State(embedder, loss, optimizer, average, folder=folder, record=record)
    if not state.restore():
        row: dict[str, Any] = {"epoch": 0, "steps": 0}
        state.end_epoch(row, judged, _validate(judged, validation, fabric.device))
    for epoch in range(state.epochs_done, recipe.epochs):
        started = time.monotonic()
        torch.manual_seed(_seed(recipe, epoch, 0))  # for backbones that drop out
        halves = torch.Generator().manual_seed(_seed(recipe, epoch, 1))
        sampler.set_epoch(epoch)
        loader = DataLoader(
            TrainingSet(pictures, augmentation, seed=recipe.seed, epoch=epoch),
            batch_sampler=Draws(sampler),
            num_workers=recipe.workers,
            generator=torch.Generator(),  # which only seeds workers, and must not draw from the global one
        )
        embedder.train()
        freeze_batchnorm(embedder, whole=recipe.freeze_batchnorm)
        sums = torch.zeros(4, dtype=torch.float64)
        label = f"Epoch {epoch + 1}/{recipe.epochs}"
        for batch, (pixels, names) in enumerate(progress(loader, label, total=len(sampler), unit="batch")):
            step = epoch * len(sampler) + batch
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(step, steps, recipe)
            # pixels uint8 (B, S, S, 3), names int64 (B,)
            labels = names.to(fabric.device)
            features = model(embedder.normalise(pixels.to(fabric.device)))
            dml = loss(features.embeddings, labels)
            xml = _cross_batch(features.histograms, features.embeddings, labels, loss, recipe, halves)
            total = (1 - recipe.xml_weight) * dml + recipe.xml_weight * xml
            fabric.backward(total)
            norm = _clip(optimizer, recipe.clip_norm)
            _check_finite(total, norm, epoch=epoch, batch=batch, step=step)
            optimizer.step()
            optimizer.zero_grad()
            if average:
                average.update_parameters(embedder)
            sums += torch.stack([value.detach().double().cpu() for value in (total, dml, xml, norm)])
        means = (sums / len(sampler)).tolist()
        row = {
            "epoch": epoch + 1,
            "steps": (epoch + 1) * len(sampler),
            **dict(zip(("loss", "dml", "xml", "gradient_norm"), means, strict=True)),
            "learning_rate": optimizer.param_groups[0]["lr"],
            "seconds": round(time.monotonic() - started, 2),
        }
        due = (epoch + 1) % recipe.evaluate_every == 0 or epoch + 1 == recipe.epochs
        state.end_epoch(row, judged, _validate(judged, validation if due else None, fabric.device))
    return state.best


class _State:
    """What a checkpoint holds: modules, optimiser, epochs done, the best one, a row for each."""

    def __init__(
        self,
        embedder: Embedder,
        loss: MetricLoss,
        optimizer: Optimizer,
        average: AveragedModel | None,
        *,
        folder: Path,
        record: dict[str, Any],
    ) -> None:
        self._modules: dict[str, nn.Module] = {"model": embedder, "loss": loss}
        if average is not None:
            self._modules["average"] = average
        self._optimizer = optimizer
        self._folder = folder
        self._record = record
        self.epochs_done = 0
        self.best: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []

    def restore(self) -> bool:
        """Take up the last checkpoint; False when there is none."""
        path = self._folder / LAST
        if not path.is_file():
            return False
        tensors, state = load_checkpoint(path)
        for name, module in self._modules.items():
            load_module(module, unprefixed(name, tensors), source=path)
        load_optimizer(self._optimizer, unprefixed("optimizer", tensors))
        self.epochs_done, self.best, self.history = state["epochs_done"], state["best"], state["history"]
        return True

    def end_epoch(self, row: dict[str, Any], judged: Embedder, measured: dict[str, Any] | None) -> None:
        """Save; the judged weights are kept when they are the best so far, or nothing is measured."""
        if measured is not None:
            row |= {"recall_at_1": measured["recall_at"]["1"], "map_at_r": measured["map_at_r"]}
        ever_measured = "map_at_r" in self.best
        if (measured is None and not ever_measured) or (
            measured is not None and not (ever_measured and self.best["map_at_r"] >= measured["map_at_r"])
        ):
            self.best = {"epoch": row["epoch"]} | (measured or {})
            save_checkpoint(self._folder / BEST, prefixed("model", judged.state_dict()), self.best)
            # what `evaluate` noted of earlier weights does not hold for these
            self._record["metrics"] = {"epoch": row["epoch"]} | ({"validation": measured} if measured else {})
        self.history.append(row)
        self.epochs_done = row["epoch"]
        tensors = prefixed("optimizer", pack_optimizer(self._optimizer))
        for name, module in self._modules.items():
            tensors |= prefixed(name, module.state_dict())
        save_checkpoint(
            self._folder / LAST,
            tensors,
            {"epochs_done": self.epochs_done, "best": self.best, "history": self.history},
        )
        write_metrics(self._folder, self.history)
        write_record(self._folder, self._record)


def _fabric(device: str, precision: str) -> Fabric:
    try:
        return Fabric(accelerator=device, devices=1, precision=precision)  # type: ignore[arg-type]
    except Exception as error:  # Lightning has a class of its own for each accelerator that is missing
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise BadSetting(f"--device {device} with precision {precision} cannot be used: {reason}") from error


def _start_head(embedder: Embedder, pictures: Pictures, recipe: Recipe) -> None:
    """Set the head by its closed form on the training images as the served model sees them."""
    if recipe.head_init == "random":
        return
    viewed = Pictures(
        pictures.rows, viewing_decoder(recipe), keep=recipe.memory_gib * 2**30, label="Reading for head"
    )
    device = embedder.prototypes.device
    features = embed_pictures(pooled_function(embedder, device), viewed, label="Features for head")  # (N, C)
    head = closed_form_head(
        features,
        torch.from_numpy(viewed.labels),
        form=recipe.head_init,
        dimension=recipe.dimension,
        shrinkage=recipe.head_shrinkage,
        power=recipe.head_power,
        centre=recipe.head_centre,
        length=recipe.head_length,
    )
    with torch.no_grad():
        embedder.head.weight.copy_(head[:, :, None, None])


def _cross_batch(
    histograms: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    loss: MetricLoss,
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
        loss,
        ridge=recipe.ridge,
        generator=generator,
        fit_on=recipe.fit_on,
    )


def _clip(optimizer: Optimizer, limit: float) -> Tensor:
    """Shorten the whole gradient to `limit` (0: leave it); returns its length before."""
    parameters: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    return nn.utils.clip_grad_norm_(parameters, limit or math.inf)


def _check_finite(loss: Tensor, norm: Tensor, *, epoch: int, batch: int, step: int) -> None:
    """Stop before a step that would spoil the weights."""
    if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
        raise BadSetting(
            f"the loss is {loss.item():.4g} and its gradient's length {norm.item():.4g} at step {step + 1}"
            f" (epoch {epoch + 1}, batch {batch + 1}): lower the learning rates or set clip_norm; the"
            f" checkpoint of epoch {epoch} is kept"
        )


def _validate(embedder: Embedder, validation: Pictures | None, device: torch.device) -> dict[str, Any] | None:
    if validation is None:
        return None
    return measure_retrieval(
        embed_pictures(embedder_function(embedder, device), validation, label="Validating"), validation.labels
    )


def _seed(recipe: Recipe, epoch: int, use: int) -> int:
    return int(np.random.SeedSequence((recipe.seed, epoch, use)).generate_state(1)[0])
