"""The tables of results, made of committed runs: `python benchmarks/tables.py [--check]`.

A page holds `<!-- table NAME -->` … `<!-- end -->`, and what lies between is made of a CSV, one row a run:
means with their 95 % Student-t intervals, and differences from a baseline over pairs of one seed, or of one
fold. A single figure in a sentence is `<!-- figure NAME COLUMN key=value … -->` … `<!-- end -->`, and with
`difference` for `figure` the difference from the baseline. Without `--check` the pages are written anew.
"""

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.evaluation.paired import interval

__all__ = ["PAGES", "TABLES", "Figure", "Table", "main", "stale"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """A column of figures: its heading, and how it is written; shares in 0..1 are told in percent."""

    title: str
    scale: float = 100
    decimals: int = 1


@dataclass(frozen=True)
class Table:
    """What a table shows of a CSV; columns are named as there."""

    groups: Mapping[str, str]
    """Column to heading: runs that agree in all of these are one row."""
    figures: Mapping[str, Figure]
    baseline: Mapping[str, str] = field(default_factory=dict)
    """The groups' values in the arm that others are compared with, the other groups being equal."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Only runs with these values."""
    source: str = ""
    """The CSV from the root on; benchmarks/results/NAME.csv when not given."""
    pair: str = "seed"
    """The column that tells the runs of a row apart, and agrees in the runs of a pair."""


_MAP = Figure("MAP@R")
_SCORES = {"map_at_r": _MAP, "recall_at_1": Figure("R@1")}
_FITTED = _SCORES | {"map_c": Figure("MAP_c"), "map_x": Figure("MAP_x")}
PAGES = ("docs/results.md", "docs/artifact.md", "docs/performance.md", "README.md")
TABLES: dict[str, Table] = {
    "random_head": Table(groups={"xml_weight": "λ"}, figures=_SCORES, baseline={"xml_weight": "0"}),
    **{
        f"study_{head}": Table(
            groups={"set": "images", "loss": "loss", "xml_weight": "λ"},
            figures=_SCORES,
            baseline={"xml_weight": "0"},
            where={"scored_on": "test", "head": head},
            source="benchmarks/results/study.csv",
        )
        for head in ("random", "whitened")
    },
    "variants": Table(
        groups={"head": "head", "variant": "variant"},
        figures=_SCORES,
        baseline={"variant": "without XML"},
        pair="fold",
    ),
    "criterion": Table(
        groups={"criterion": "criterion"},
        figures={"map_at_r": _MAP, "correlation": Figure("rank correlation", 1, 2)},
        baseline={"criterion": "MAP@R"},
    ),
    "scratch": Table(
        groups={"recipe": "recipe", "xml_weight": "λ"}, figures=_SCORES, baseline={"xml_weight": "0"}
    ),
    "fitted": Table(groups={"xml_weight": "λ"}, figures=_FITTED, baseline={"xml_weight": "0"}),
    "head": Table(groups={"xml_weight": "λ"}, figures=_SCORES, baseline={"xml_weight": "0"}),
    "margin": Table(
        groups={"loss_options": "margin", "head_learning_rate": "rate of the head"},
        figures=_SCORES,
        baseline={"loss_options": "{neg_margin: 0.3}", "head_learning_rate": "0.00002"},
        pair="fold",
    ),
    "assignment": Table(
        groups={"assign_on": "softmax over", "assignment_scale": "ε"},
        figures=_SCORES,
        baseline={"assign_on": "unit", "assignment_scale": "10"},
    ),
    "ridge": Table(
        groups={"ridge": "ridge", "codebook_init": "start"},
        figures=_SCORES,
        baseline={"ridge": "0.05", "codebook_init": "random"},
    ),
    "weight": Table(
        groups={"prototypes": "m", "xml_weight": "λ"}, figures=_SCORES, baseline={"xml_weight": "0"}
    ),
    "load": Table(
        groups={"model": "model", "in_flight": "in flight"},
        figures={
            "ratio": Figure("÷ plain loop", 1, 3),
            "images_per_second": Figure("images/s", 1, 0),
            "p50_ms": Figure("p50 ms", 1, 1),
            "p95_ms": Figure("p95 ms", 1, 1),
            "extra_ms": Figure("beyond the plain loop, ms", 1),
            "client_share": Figure("client, % of the machine"),
        },
        where={"what": "embed"},
        pair="round",
    ),
    "overload": Table(
        groups={"model": "model"},
        figures={
            "offered": Figure("offered ÷ peak", 1),
            "goodput": Figure("answered ÷ peak", 1, 2),
            "refusal_p99_ms": Figure("p99 of refusals, ms", 1, 0),
            "unexpected": Figure("neither", 1, 0),
            "client_share": Figure("client, % of the machine"),
        },
        where={"what": "overload"},
        source="benchmarks/results/load.csv",
        pair="what",
    ),
    "search": Table(
        groups={"part": "of 60,000 × 512", "contestant": ""},
        figures={
            "recall": Figure("recall@10", 1, 4),
            "p50_ms_1": Figure("p50 ms", 1, 2),
            "queries_per_second_1": Figure("queries/s, one a call", 1, 0),
            "queries_per_second_64": Figure("queries/s, 64 a call", 1, 0),
        },
        where={"items": "60000", "dimension": "512"},
        pair="sort",
    ),
    "providers": Table(
        groups={"model": "model", "threads": "threads", "batch": "batch"},
        figures={
            "ratio": Figure("OpenVINO ÷ CPU", 1, 2),
            "first_quartile": Figure("first quartile", 1, 2),
            "third_quartile": Figure("third quartile", 1, 2),
            "difference": Figure("farthest component, 1e-7", 1e7),
        },
        where={"provider": "openvino"},
        pair="provider",
    ),
    "decode": Table(
        groups={"photos": "photos", "decoder": "decoder"},
        figures={
            "images_per_second": Figure("images/s", 1, 0),
            "ratio": Figure("÷ as served", 1, 2),
            "difference": Figure("levels away", 1),
            "recall_at_1": Figure("R@1", 100, 2),
            "map_at_r": Figure("MAP@R", 100, 2),
        },
        pair="images",
    ),
    "precision": Table(
        groups={"model": "model", "batch": "batch"},
        figures={
            "ratio": Figure("int8 ÷ fp32, images/s", 1, 2),
            "recall_at_1_change": Figure("Δ R@1, points", 100, 2),
            "map_at_r_change": Figure("Δ MAP@R, points", 100, 2),
        },
        where={"threads": "1"},
        pair="turn",
    ),
    "two_arms": Table(groups={"arm": "arm"}, figures=_FITTED, source="docs/figures/two_arms.csv"),
    "covering": Table(
        groups={"m": "m"},
        figures={"radius": Figure("δ", 1, 2), "discrepancy": Figure("discrepancy", 1, 2)},
        source="docs/figures/covering.csv",
    ),
}

Run = Mapping[str, str]
_MARKED = re.compile(r"<!-- (table|figure|difference) ([^>]+?) -->(.*?)<!-- end -->", re.DOTALL)
_BEGUN = re.compile(r"<!-- (?:table|figure|difference) ")


def stale(root: Path, tables: Mapping[str, Table] = TABLES, pages: Sequence[str] = PAGES) -> dict[Path, str]:
    """Make each page anew.

    Returns:
        The new text of those pages that it changes.

    Raises:
        ValueError: If a marker or a table asks for what is not there, or runs are not in pairs.
    """
    found = {}
    for page in (root / name for name in pages):
        text = page.read_text(encoding="utf-8")
        if not len(_MARKED.findall(text)) == len(_BEGUN.findall(text)) == text.count("<!-- end -->"):
            raise ValueError(f"{page}: a marker does not end, or ends twice")
        made = _MARKED.sub(lambda match: _filled(match, root, tables), text)
        if made != text:
            found[page] = made
    return found


def differing(before: str, after: str) -> list[str]:
    """Give the markers whose contents differ between two states of a page."""
    pairs = zip(_MARKED.finditer(before), _MARKED.finditer(after), strict=True)
    return [f"{old[1]} {old[2]}" for old, new in pairs if old[3] != new[3]]


def _filled(match: re.Match[str], root: Path, tables: Mapping[str, Table]) -> str:
    kind, (name, *words) = match[1], match[2].split()
    if name not in tables:
        raise ValueError(f"{kind} {match[2]}: there is no table {name!r} among {', '.join(tables) or 'none'}")
    table = tables[name]
    try:
        groups = _grouped(table, root / (table.source or f"benchmarks/results/{name}.csv"))
        if kind == "table":
            content = f"\n{_table(table, groups)}\n"
        else:
            column, *given = words
            content = _single(table, groups, column, dict(word.split("=", 1) for word in given), kind)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{kind} {match[2]}: {error}") from error
    return f"<!-- {kind} {match[2]} -->{content}<!-- end -->"


def _grouped(table: Table, path: Path) -> dict[tuple[str, ...], dict[str, Run]]:
    """Read runs, and put them by group, in the order of the file, and by pair."""
    with path.open(encoding="utf-8", newline="") as file:
        runs = [
            run for run in csv.DictReader(file) if all(run[key] == table.where[key] for key in table.where)
        ]
    if not runs:
        raise ValueError(f"{path.name} has no such runs")
    wanted = {*table.groups, *table.figures, *table.baseline, table.pair}
    if lacking := wanted - runs[0].keys():
        raise ValueError(f"{path.name} has no column {', '.join(sorted(lacking))}")
    groups: dict[tuple[str, ...], dict[str, Run]] = {}
    for run in runs:
        pairs = groups.setdefault(tuple(run[name] for name in table.groups), {})
        if run[table.pair] in pairs:
            raise ValueError(
                f"{path.name} has two runs of {table.pair} {run[table.pair]} in one group: {dict(run)}"
            )
        pairs[run[table.pair]] = run
    return groups


def _table(table: Table, groups: Mapping[tuple[str, ...], Mapping[str, Run]]) -> str:
    """Write a table, a line a group; differences stand to the right of what they are differences of."""
    head = [*table.groups.values(), "runs"]
    for figure in table.figures.values():
        head += [figure.title, *([f"Δ {figure.title}"] if table.baseline else [])]
    lines = [head, ["---"] * len(table.groups) + ["---:"] * (len(head) - len(table.groups))]
    for group, runs in groups.items():
        line = [*group, str(len(runs))]
        for column in table.figures:
            line.append(_mean(table, runs, column))
            if table.baseline:
                line.append(_difference(table, groups, group, column))
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _single(
    table: Table,
    groups: Mapping[tuple[str, ...], Mapping[str, Run]],
    column: str,
    given: Mapping[str, str],
    kind: str,
) -> str:
    """Write the figure of the one group that has the given values."""
    places = {list(table.groups).index(name): value for name, value in given.items()}
    chosen = [group for group in groups if all(group[place] == value for place, value in places.items())]
    if len(chosen) != 1:
        raise ValueError(f"{len(chosen)} rows are meant, where there must be one")
    if kind == "figure":
        return _mean(table, groups[chosen[0]], column)
    return _difference(table, groups, chosen[0], column)


def _mean(table: Table, runs: Mapping[str, Run], column: str) -> str:
    values = _values(table, runs, column, list(runs))
    if not values:
        return "–"
    mean, half = interval(values)
    decimals = table.figures[column].decimals
    return f"{mean:.{decimals}f}" if half is None else f"{mean:.{decimals}f} ± {half:.{decimals}f}"


def _difference(
    table: Table, groups: Mapping[tuple[str, ...], Mapping[str, Run]], group: tuple[str, ...], column: str
) -> str:
    """Write the mean difference from the baseline over seeds, and its interval's ends."""
    own = dict(zip(table.groups, group, strict=True))
    other = tuple({**own, **table.baseline}[name] for name in table.groups)
    if other == group:
        return ""
    if other not in groups:
        raise ValueError(f"the row {' '.join(group)} has no baseline {' '.join(other)}")
    pairs = list(groups[group])
    if set(pairs) != set(groups[other]):
        raise ValueError(f"the {table.pair}s of the row {' '.join(group)} are not those of {' '.join(other)}")
    first, second = (_values(table, groups[each], column, pairs) for each in (group, other))
    if not first or not second:
        return "–"
    mean, half = interval(first, second)
    decimals = table.figures[column].decimals
    ends = "" if half is None else f" ({mean - half:+.{decimals}f} to {mean + half:+.{decimals}f})"
    return f"{mean:+.{decimals}f}{ends}"


def _values(table: Table, runs: Mapping[str, Run], column: str, pairs: Sequence[str]) -> list[float]:
    """Give a column in the order of pairs, as it is told; nothing where no run has a value."""
    told = [runs[pair][column] for pair in pairs]
    if not any(told):
        return []
    return [table.figures[column].scale * float(value) for value in told]


def main(words: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Write the pages, or say which of their tables are not what the runs give; exit status 1 then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where one differs")
    options = parser.parse_args(words)
    try:
        found = stale(root)
    except ValueError as error:
        print(error)
        return 1
    for page, text in found.items():
        for name in differing(page.read_text(encoding="utf-8"), text):
            print(
                f"{page.relative_to(root)}: {name} {'differs from its runs' if options.check else 'written'}"
            )
        if not options.check:
            page.write_text(text, encoding="utf-8")
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
