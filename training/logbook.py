"""The logbook of a run: after each epoch a checkpoint, the weights kept, a line of figures, the record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from training.checkpoint import (
    entry,
    load_checkpoint,
    load_module,
    load_optimizer,
    pack_optimizer,
    prefixed,
    save_checkpoint,
    unprefixed,
)
from training.embedder import Embedder
from training.run import BEST, LAST, write_metrics, write_record

__all__ = ["Logbook"]


class Logbook:
    """What a run folder keeps of a training: weights, optimiser, epochs done, the best, a row for each."""

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizer: Optimizer, *, folder: Path, record: dict[str, Any]
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._folder = folder
        self._record = record
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
        self.epochs_done = entry(state, "epochs_done", int, source=path)
        self.best = entry(state, "best", dict, source=path)
        self.history = entry(state, "history", list, source=path)
        entry(self.best, "epoch", int, source=path)

    def end_epoch(self, row: dict[str, Any], judged: Embedder, measured: dict[str, Any] | None) -> None:
        """Save; the judged weights are kept when they are the best so far, or nothing is measured.

        Raises:
            CrossbatchError: If a file cannot be written.
        """
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
