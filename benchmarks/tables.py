"""The tables of results, made of committed runs: `python benchmarks/tables.py [--check]`.

A page holds `<!-- table NAME -->` … `<!-- end -->`, and what lies between is made of a CSV, one row a run:
means with their 95 % Student-t intervals, and differences from a baseline over pairs of one seed, or of one
fold. A single figure in a sentence is `<!-- figure NAME COLUMN key=value … -->` … `<!-- end -->`, and with
`difference` for `figure` the difference from the baseline. Without `--check` the pages are written anew.
With `--price DOLLARS` only the tables of costs are printed, at that price of a core for an hour.
"""

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layout import TABLES, Run, Table, cost_tables
from training.evaluation.paired import interval

__all__ = ["PAGES", "main", "stale"]

ROOT = Path(__file__).resolve().parent.parent

PAGES = ("docs/results.md", "docs/artifact.md", "docs/performance.md", "docs/scaling.md", "README.md")
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
    runs = [run | {name: str(of(run)) for name, of in table.derived.items()} for run in runs]
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
    head = [*table.groups.values(), *["runs"] * table.counted]
    for figure in table.figures.values():
        head += [figure.title, *([f"Δ {figure.title}"] if table.baseline else [])]
    lines = [head, ["---"] * len(table.groups) + ["---:"] * (len(head) - len(table.groups))]
    for group, runs in groups.items():
        line = [*group, *[str(len(runs))] * table.counted]
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
    parser.add_argument("--price", type=float, help="dollars for a core and an hour; prints what all costs")
    options = parser.parse_args(words)
    if options.price:
        for name, table in cost_tables(options.price).items():
            print(f"{name}\n\n{_table(table, _grouped(table, root / table.source))}\n")
        return 0
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
