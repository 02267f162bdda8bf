"""What XML is worth, by data set, head and loss: `python benchmarks/study.py --data DIR --out DIR`.

Each arm, with XML and without, has its rate chosen by its mean MAP@R on validation classes, from as many
trials; then all training classes train it anew, and the unseen ones score it. OUT/study.csv holds every run
of both. What is finished is not done again, so a study that was cut goes on.
"""

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.evaluation import sweep

COMMON = "epochs=2 batches_per_epoch=100 clip_norm=0 prototype_learning_rate=3e-3 loss_learning_rate=1e-2"
_FEW = "classes_per_batch=3 images_per_class=16 validation=0.4"
_MANY = "classes_per_batch=16 images_per_class=4 folds=3"
SETS = {
    "cub100": _MANY,
    "omniglot": f"{_MANY} image_size=112 split_by=folder split_train=5 flip=0 views=1",
    "clothing": _FEW,
    "cifar10": f"{_FEW} image_size=112",
}
"""Folder of each data set below --data, and the settings of its size.

All but the first two train on 5 classes. A rate is tried on folds of the training classes, or from several
seeds where these are too few for folds.
"""

HEADS = {
    "random": (
        "head_init=random dimension=128 location_share=0.6",
        ("0.00003", "0.0001", "0.0003", "0.001", "0.003"),
        ("0", "0.3"),
    ),
    "whitened": ("location_share=0.3", ("0.000005", "0.00002", "0.0001", "0.0005", "0.002"), ("0", "0.1")),
}
"""Settings of each start of the recipe `head`, the rates that are tried, and the values of λ."""

LOSSES = {
    "contrastive": "{pos_margin: 1.0, neg_margin: 0.3}",
    "multi_similarity": "{alpha: 2, beta: 50, base: 0.5, epsilon: 0.1}",
    "proxy_anchor": "{margin: 0.1, alpha: 32}",
    "triplet": "{margin: 0.2, miner: semihard}",
    "proxy_nca": "{temperature: 0.1111}",
}
CONTROL = "0.000001"
"""A λ that only draws other random numbers; with the rate of λ = 0, on the first loss."""

COLUMNS = (
    "set",
    "head",
    "loss",
    "xml_weight",
    "head_learning_rate",
    "scored_on",
    "fold",
    "seed",
    "map_at_r",
    "recall_at_1",
)


def study_cell(
    data: Path, out: Path, cell: tuple[str, str, str], *, seeds: int, tuning: int, extra: Sequence[str] = ()
) -> None:
    """Tune each arm of one data set, head and loss on validation classes, and score it on the unseen ones."""
    name, head, loss = cell
    settings, rates, weights = HEADS[head]
    common = [
        *f"{COMMON} {SETS[name]} {settings} loss={loss}".split(),
        f"loss_options={LOSSES[loss]}",
        *extra,
    ]
    folder = out / name / head / loss

    def swept(over: list[str], count: int, *, final: bool) -> list[dict[str, Any]]:
        place = folder / ("test" if final else "validation")
        told = sweep.run(
            sweep.Settings(
                recipe="head", data=data / name, out=place, over=over, set=common, seeds=count, final=final
            )
        )
        arms: list[dict[str, Any]] = told["arms"]
        return arms

    over = ["xml_weight=" + ",".join(weights), "head_learning_rate=" + ",".join(rates)]
    if "folds=" in SETS[name]:
        over.append("fold=" + ",".join(map(str, range(tuning))))
    arms = swept(over, 1 if "folds=" in SETS[name] else tuning, final=False)

    def score(weight: str, rate: str) -> float:
        wanted = {"xml_weight": weight, "head_learning_rate": rate}
        return fmean(arm["map_at_r"]["mean"] for arm in arms if wanted.items() <= arm["settings"].items())

    for weight in weights:
        rate = max(rates, key=lambda rate: score(weight, rate))
        control = [CONTROL] if weight == "0" and loss == next(iter(LOSSES)) else []
        for value in (weight, *control):
            swept([f"xml_weight={value}", f"head_learning_rate={rate}"], seeds, final=True)


def gather(out: Path) -> list[Mapping[str, str]]:
    """Read the runs of all cells that are there, in the order of the tables above."""
    found = []
    for name, head, loss in _cells():
        for part in ("validation", "test"):
            table = out / name / head / loss / part / "runs.csv"
            if table.is_file():
                with table.open(encoding="utf-8", newline="") as lines:
                    cell = {"set": name, "head": head, "loss": loss}
                    found += [cell | row for row in csv.DictReader(lines)]
    return found


def _cells() -> list[tuple[str, str, str]]:
    return [(name, head, loss) for loss in LOSSES for head in HEADS for name in SETS]


def main(words: Sequence[str] | None = None) -> int:
    """Study what is asked for, and write OUT/study.csv."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help=f"folder of {', '.join(SETS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=SETS, default=list(SETS), help="data sets")
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--heads", nargs="*", choices=HEADS, default=list(HEADS))
    parser.add_argument("--seeds", type=int, default=5, help="runs an arm on the unseen classes")
    parser.add_argument(
        "--tuning", type=int, default=3, choices=(1, 2, 3), help="runs a rate on validation classes"
    )
    parser.add_argument("--set", nargs="*", default=[], help="further settings of all runs, key=value")
    options = parser.parse_args(words)
    for cell in _cells():
        name, head, loss = cell
        if name in options.only and head in options.heads and loss in options.losses:
            study_cell(
                options.data, options.out, cell, seeds=options.seeds, tuning=options.tuning, extra=options.set
            )
    with (options.out / "study.csv").open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(gather(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
