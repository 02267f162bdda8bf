"""The logbook of a run: after each epoch a checkpoint, the weights kept, a line of figures, the record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fabric.plugins.precision import Precision
from torch import nn
from torch.optim import Optimizer

from training.loop.checkpoint import (
    entry,
    load_checkpoint,
    load_module,
    load_optimizer,
    pack_optimizer,
    prefixed,
    save_checkpoint,
    unprefixed,
)
from training.loop.run import BEST, LAST, write_metrics, write_record
from training.network.embedder import Embedder
from training.recipes.recipe import Recipe

__all__ = ["Logbook"]


class Logbook:
    """What a run folder keeps of a training: weights, optimiser, epochs done, the best, a row for each.

    Args:
        modules: What a checkpoint holds, by name.
        optimizer: Of these.
        precision: Lightning's; with fp16 it has a scale of gradients to keep.
        recipe: When an epoch is better, and when it is time to stop.
        folder: The run's.
        record: The run's; its `metrics` are brought up to date.
        writes: Whether this process writes files, as one of several does.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer,
        *,
        precision: Precision,
        recipe: Recipe,
        folder: Path,
        record: dict[str, Any],
        writes: bool = True,
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._precision = precision
        self._recipe = recipe
        self._folder = folder
        self._record = record
        self._writes = writes
        self.epochs_done = 0
        self.best: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []

    def restore(self) -> None:
        """Take up the last checkpoint.

        Raises:
            CrossbatchError: If it is damaged or of another architecture.
        """
        path = self._folder / LAST
        tensors, state = load_checkpoint(path)
        for name, module in self._modules.items():
            load_module(module, unprefixed(name, tensors), source=path)
        load_optimizer(self._optimizer, unprefixed("optimizer", tensors), source=path)
        if scale := self._precision.state_dict():
            found = entry(state, "precision", dict, source=path)
            self._precision.load_state_dict(
                {name: entry(found, name, type(value), source=path) for name, value in scale.items()}
            )
        self.epochs_done = entry(state, "epochs_done", int, source=path)
        self.best = entry(state, "best", dict, source=path)
        self.history = entry(state, "history", list, source=path)
        entry(self.best, "epoch", int, source=path)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or `patience` of them, the last one measured, brought nothing."""
        if self.epochs_done >= self._recipe.epochs:
            return True
        waited = self.epochs_done - int(self.best.get("epoch", self.epochs_done))
        measured = self.epochs_done % self._recipe.evaluate_every == 0
        return measured and 0 < self._recipe.patience <= waited and "map_at_r" in self.best

    def end_epoch(self, row: dict[str, Any], eval_model: Embedder, measured: dict[str, Any] | None) -> None:
        """Save; the weights that are measured are kept when they are the best so far, or nothing is measured.

        Raises:
            CrossbatchError: If a file cannot be written.
        """
        if measured is not None:
            row |= {"recall_at_1": measured["recall_at"]["1"], "map_at_r": measured["map_at_r"]}
        if self._is_better(measured):
            self.best = {"epoch": row["epoch"]} | (measured or {})
            if self._writes:
                save_checkpoint(self._folder / BEST, prefixed("model", eval_model.state_dict()), self.best)
            # what `evaluate` noted of earlier weights does not hold for these
            self._record["metrics"] = {"epoch": row["epoch"]} | ({"validation": measured} if measured else {})
        self.history.append(row)
        self.epochs_done = row["epoch"]
        if self._writes:
            self._save()

    def _is_better(self, measured: dict[str, Any] | None) -> bool:
        """Compare MAP@R with the best so far; where nothing was ever measured, the last epoch is best."""
        if "map_at_r" not in self.best:
            return True
        return measured is not None and measured["map_at_r"] > self.best["map_at_r"] + self._recipe.min_delta

    def _save(self) -> None:
        tensors = prefixed("optimizer", pack_optimizer(self._optimizer))
        for name, module in self._modules.items():
            tensors |= prefixed(name, module.state_dict())
        save_checkpoint(
            self._folder / LAST,
            tensors,
            {
                "epochs_done": self.epochs_done,
                "finished": self.finished,
                "best": self.best,
                "history": self.history,
                "precision": self._precision.state_dict(),
            },
        )
        write_metrics(self._folder, self.history)
        write_record(self._folder, self._record)
