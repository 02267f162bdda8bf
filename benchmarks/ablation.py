"""What each choice of the method brings: `python benchmarks/ablation.py RECIPE --data DIR --out DIR`.

Trains a recipe once for each variant and seed, and measures the classes that no training has seen. A variant
is a name and the settings that it changes; `--variant "warm-up: xml_warmup=0.3"` replaces the table below.
What is finished is not done again, so a run that was cut goes on.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serving.errors import NotFound
from training import evaluate, train
from training.run import LAST, read_record

VARIANTS = {
    "without XML": "xml_weight=0",
    "XML": "",
    "XML, lambda 0.1": "xml_weight=0.1",
    "XML, lambda warms up": "xml_warmup=0.5",
    "XML, lambda falls": "xml_schedule=cosine",
    "XML, recursion": "xml_prototypes=recursion",
    "XML, memory": "memory_batches=20 memory_start=50",
}


def ablate(
    recipe: str, data: Path, out: Path, variants: dict[str, str], seeds: int, common: Sequence[str] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Train and measure every variant with every seed.

    Args:
        recipe: Name or path.
        data: The images.
        out: Where the runs go, `<variant>/<seed>` each.
        variants: Name to settings, `key=value` divided by blanks.
        seeds: How many, from 0.
        common: Settings of all variants.

    Returns:
        For each variant its figures on the test classes, a seed each.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name, changes in variants.items():
        for seed in range(seeds):
            folder = out / name.replace(" ", "_").replace(",", "") / str(seed)
            figures = _finished(folder)
            if figures is None:
                again = (folder / LAST).is_file()
                train.run(
                    train.Settings(out=folder, resume=True)
                    if again
                    else train.Settings(
                        recipe=recipe, data=data, out=folder, set=[*common, *changes.split(), f"seed={seed}"]
                    )
                )
                evaluate.run(evaluate.Settings(target=folder))
                figures = _finished(folder)
            assert figures is not None
            found.setdefault(name, []).append(figures)
    return found


def _finished(folder: Path) -> dict[str, Any] | None:
    """Give the figures on the test classes that a run's record holds."""
    try:
        figures: dict[str, Any] | None = read_record(folder)["metrics"].get("test")
    except NotFound:
        return None
    return figures


def told(figures: Sequence[float]) -> str:
    """Give mean and standard deviation in percent; one figure has none."""
    spread = f" ± {100 * statistics.stdev(figures):.2f}" if len(figures) > 1 else ""
    return f"{100 * statistics.fmean(figures):.2f}{spread}"


def main() -> None:
    """Print a line for each variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a setting of all variants")
    parser.add_argument("--variant", action="append", default=[], help="name: key=value key=value")
    options = parser.parse_args()
    given = (variant.partition(":") for variant in options.variant)
    variants = {name.strip(): changes.strip() for name, _, changes in given} or VARIANTS
    found = ablate(options.recipe, options.data, options.out, variants, options.seeds, options.set)
    print(f"| {options.recipe}, {options.seeds} seeds | MAP@R | R@1 |\n| --- | --- | --- |")
    for name, rows in found.items():
        print(
            f"| {name} | {told([row['map_at_r'] for row in rows])}"
            f" | {told([row['recall_at']['1'] for row in rows])} |"
        )


if __name__ == "__main__":
    main()
