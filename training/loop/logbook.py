"""The logbook of a run, written after each epoch: checkpoints, metrics.csv, the record; and its reading."""

import contextlib
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from serving.errors import BadArtifact
from training.loop import checkpoint
from training.loop.run import BEST, LAST, METRICS, write_record
from training.loop.trainee import Trainee
from training.network.weights import fit_weights
from training.recipes.recipe import Recipe

__all__ = ["History", "Logbook", "curves", "dead_note", "read_history", "waited_share"]

History = Sequence[Mapping[str, float]]
"""The epochs of a run, by rising number; a row has `epoch` and whatever else is a finite number in it."""
_ALIVE = 4  # fewer eigenvalues above the ridge than this express next to nothing
_RESTING = ("model.backbone.", "average.module.backbone.")


class Logbook:
    """What a run folder keeps of a training; of several processes the first one writes files."""

    def __init__(self, trainee: Trainee, recipe: Recipe, folder: Path, record: dict[str, Any]) -> None:
        self._trainee, self._recipe, self._folder, self._record = trainee, recipe, folder, record
        self._precision = trainee.fabric.strategy.precision
        self._writes = trainee.fabric.is_global_zero
        self.epochs_done = 0
        self.best: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []

    def restore(self) -> None:
        """Take up the last checkpoint; a `CrossbatchError` if it is damaged or of another architecture."""
        path = self._folder / LAST
        tensors, state = checkpoint.load_checkpoint(path)
        if self._recipe.caches_features:  # a backbone that rests is the one of the weights that were kept
            kept = checkpoint.unprefixed("model.backbone", checkpoint.load_checkpoint(self._folder / BEST)[0])
            tensors = {f"{part}{name}": value for part in _RESTING for name, value in kept.items()} | tensors
        modules = self._trainee.modules
        weights = {name: value for name, value in tensors.items() if name.partition(".")[0] in modules}
        fit_weights(modules, weights, source=path)
        checkpoint.load_optimizer(self._trainee.optimizer, tensors)
        self._precision.load_state_dict(state.get("precision", {}))
        self.epochs_done = checkpoint.entry(state, "epochs_done", int, source=path)
        self.best = checkpoint.entry(state, "best", dict, source=path)
        self.history = checkpoint.entry(state, "history", list, source=path)
        checkpoint.entry(self.best, "epoch", int, source=path)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or `patience` of them, the last one measured, brought nothing."""
        if self.epochs_done >= self._recipe.epochs:
            return True
        waited = self.epochs_done - int(self.best.get("epoch", self.epochs_done))
        measured = self.epochs_done % self._recipe.evaluate_every == 0
        return measured and 0 < self._recipe.patience <= waited and "map_at_r" in self.best

    def end_epoch(self, row: dict[str, Any], measured: dict[str, Any] | None) -> None:
        """Save; the measured weights are kept when they are the best so far, or nothing is measured."""
        if measured is not None:
            row |= {"recall_at_1": measured["recall_at"]["1"], "map_at_r": measured["map_at_r"]}
        if self._is_better(measured):
            self.best = {"epoch": row["epoch"]} | (measured or {})
            if self._writes:
                kept = nn.ModuleDict({"model": self._trainee.eval_model})
                checkpoint.save_checkpoint(self._folder / BEST, kept.state_dict(), self.best)
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
        tensors = checkpoint.pack_optimizer(self._trainee.optimizer) | self._trainee.modules.state_dict()
        if self._recipe.caches_features:
            tensors = {name: value for name, value in tensors.items() if not name.startswith(_RESTING)}
        state = {
            "epochs_done": self.epochs_done,
            "finished": self.finished,
            "best": self.best,
            "history": self.history,
            "precision": self._precision.state_dict(),
        }
        checkpoint.save_checkpoint(self._folder / LAST, tensors, state)
        names = dict.fromkeys(name for row in self.history for name in row)
        checkpoint.write_table(self._folder / METRICS, self.history, [*names])
        write_record(self._folder, self._record)


def read_history(path: Path) -> History:
    """Read the history of a run folder, empty where there is none; `BadArtifact` if the file is no table.

    A row that names no epoch is passed over, and of two of one epoch the last counts.
    """
    file = path / METRICS
    if not file.is_file():
        return []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = [_finite(row.items()) for row in csv.DictReader(lines)]
    except (OSError, ValueError, csv.Error) as error:
        raise BadArtifact(f"{file} is damaged: it is not a readable table ({error})") from error
    by_epoch = {row["epoch"]: row for row in rows if "epoch" in row}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _finite(cells: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Keep what is a finite number under a name; DictReader puts cells past the head under None."""
    found = {}
    for name, cell in cells:
        with contextlib.suppress(ValueError, TypeError):
            if name and math.isfinite(value := float(cell)):
                found[name] = value
    return found


def waited_share(rows: Iterable[Mapping[str, float]]) -> float | None:
    """Give the share of the epochs' seconds that steps waited for batches; None if no row tells of both."""
    told = [(row["waited"], row["seconds"]) for row in rows if row.get("seconds") and "waited" in row]
    return sum(waited for waited, _ in told) / sum(seconds for _, seconds in told) if told else None


def dead_note(rows: Iterable[Mapping[str, Any]], recipe: Recipe) -> str | None:
    """Say that the term is dead, and what wakes it, if it was in the last measured of rows of metrics.csv."""
    measured = [row for row in rows if "eigenvalues" in row]
    if not recipe.xml_weight or not measured:
        return None
    last = measured[-1]
    if last["eigenvalues"] >= min(_ALIVE, recipe.prototypes):
        return None
    cure = (
        "To wake it, set assignment_scale higher, assign_on to raw or ball, codebook_init to start from the"
        " images, or ridge lower."
    )
    if (half := recipe.batch_size // 2) < _ALIVE:
        cure = f"A half of a batch is {half} images: raise classes_per_batch or images_per_class."
    return (
        f"The cross-batch term is dead at epoch {last['epoch']:g}: {last['eigenvalues']:g} of"
        f" {recipe.prototypes} eigenvalues of what its prototypes are fitted to are above the ridge, and with"
        f" fewer than {_ALIVE} it expresses all images alike. {cure}"
    )


@contextlib.contextmanager
def curves(folder: Path | None, history: Sequence[Mapping[str, Any]]) -> Iterator[Callable[..., None]]:
    """Open TensorBoard's curves in a folder, the epochs so far drawn anew; without one nothing is drawn."""
    if folder is None:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), purge_step=0) as board:

        def draw(row: Mapping[str, Any]) -> None:
            for name in row.keys() - {"epoch", "steps"}:
                board.add_scalar(name, row[name], row["steps"])
            board.flush()

        for row in history:
            draw(row)
        yield draw
