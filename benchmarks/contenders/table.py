"""The match as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contenders.match import BATCHES, PASSES, Row

__all__ = ["ratios", "tables"]

_SECONDS = ("load_seconds", "index_seconds")
_SORTS = {"crossbatch": "", "server": "", "store": " (store)", "library": " (library)"}
_FIGURES = ("recall@10", "p50 ms", "p99 ms", *(f"queries/s, batch {batch}" for batch in BATCHES))


def tables(rows: Sequence[Row]) -> str:
    """Return the tables of all that was measured: search, what it needs, filters, changes."""
    parts = [_speed(rows), _needs(rows), _filters(rows), _changes(rows)]
    return "\n\n".join(part for part in parts if part)


def ratios(rows: Sequence[Row]) -> str:
    """Return how many times as fast crossbatch is as the faster store, through clients and in the process."""
    stores = [row for row in rows if row.contestant.sort == "store" and _timed(row.plain)]
    lines = []
    for sort in ("server", "crossbatch"):
        ours = next((row for row in rows if row.contestant.sort == sort and _timed(row.plain)), None)
        for batch in BATCHES if ours and stores else ():
            assert ours is not None
            best = max(stores, key=lambda row: _rate(row.plain, batch))
            times = _rate(ours.plain, batch) / _rate(best.plain, batch)
            title = ours.contestant.title
            lines.append(f"- {title}, batch of {batch}: {times:.2f} times {best.contestant.title}")
    return "\n".join(lines)


def _speed(rows: Sequence[Row]) -> str:
    head = ["", *_FIGURES, "set to"]
    body = []
    for row, label in _labelled(rows):
        cells = _figures(row.plain)
        body.append([label, *(cells or [""] * len(_FIGURES)), _setting(row)])
    return _table(head, body)


def _needs(rows: Sequence[Row]) -> str:
    head = ["", "load s", "index s", "disk MB", "memory MB", "mapped MB", "first answer s", "built"]
    body = []
    for row, label in _labelled(rows):
        if not row.memory:
            continue
        built = row.built
        body.append(
            [
                label,
                *([f"{built[name]:.1f}" for name in _SECONDS] if built else ["", ""]),
                f"{built['disk_bytes'] / 1e6:.0f}" if built else "",
                f"{row.memory['anonymous_bytes'] / 1e6:.0f}",
                f"{row.memory['mapped_bytes'] / 1e6:.0f}",
                f"{row.first_answer_seconds:.2f}",
                built.get("about", ""),
            ]
        )
    return _table(head, body)


def _filters(rows: Sequence[Row]) -> str:
    body = [
        [f"{percent} %", label, *cells]
        for percent in PASSES
        for row, label in _labelled(rows)
        if (cells := _figures(row.filtered.get(str(percent), {})))
    ]
    return _table(["filter passes", "", *_FIGURES], body) if body else ""


def _changes(rows: Sequence[Row]) -> str:
    body = [
        [label, f"{row.changed['seconds']:.1f}", *cells]
        for row, label in _labelled(rows)
        if (cells := _figures(row.changed))
    ]
    return _table(["after changes", "they took s", *_FIGURES], body) if body else ""


def _labelled(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    return [
        (row, row.contestant.title + said)
        for sort, said in _SORTS.items()
        for row in rows
        if row.contestant.sort == sort
    ]


def _figures(measured: Mapping[str, Any]) -> list[str]:
    """Return recall, p50, p99 and queries/s as text; nothing where they were not all measured."""
    if not _timed(measured):
        return []
    one = measured[str(BATCHES[0])]
    rates = (f"{_rate(measured, batch):,.0f}" for batch in BATCHES)
    return [f"{measured['recall']:.4f}", f"{one['p50_ms']:.2f}", f"{one['p99_ms']:.2f}", *rates]


def _timed(measured: Mapping[str, Any]) -> bool:
    return all(str(batch) in measured for batch in BATCHES)


def _rate(measured: Mapping[str, Any], batch: int) -> float:
    return float(measured[str(batch)]["queries_per_second"])


def _setting(row: Row) -> str:
    setting = row.plain.get("setting")
    said = "" if setting is None else f"ef {setting}"
    return f"{said} failed: {row.failed}".strip() if row.failed else said


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
