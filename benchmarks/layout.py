"""Which tables the pages have, and what each shows of its CSV of runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["TABLES", "Figure", "Run", "Table", "cost_tables"]

Run = Mapping[str, str]


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
    derived: Mapping[str, Callable[["Run"], float]] = field(default_factory=dict)
    """Columns that are worked out of the others of a run."""
    counted: bool = True
    """Whether it tells how many runs a row is made of."""


_MAP = Figure("MAP@R")
_SCORES = {"map_at_r": _MAP, "recall_at_1": Figure("R@1")}
_FITTED = _SCORES | {"map_c": Figure("MAP_c"), "map_x": Figure("MAP_x")}
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
    **{
        name: Table(
            groups={"part": f"of {int(items):,} × {dimension}", "contestant": ""},
            figures={
                "recall": Figure("recall@10", 1, 4),
                "p50_ms_1": Figure("p50 ms", 1, 2),
                "queries_per_second_1": Figure("queries/s, one a call", 1, 0),
                "queries_per_second_64": Figure("queries/s, 64 a call", 1, 0),
            },
            where={"items": items, "dimension": dimension},
            source="benchmarks/results/search.csv",
            pair="sort",
        )
        for name, items, dimension in (("search", "60000", "512"), ("search_million", "1000000", "128"))
    },
    "sizes": Table(
        groups={"items": "items", "contestant": "index"},
        figures={
            "recall": Figure("recall@10", 1, 4),
            "p50_ms_1": Figure("p50 ms", 1, 2),
            "queries_per_second_1": Figure("queries/s, one a call", 1, 0),
            "queries_per_second_64": Figure("64 a call", 1, 0),
            "build_seconds": Figure("built in s", 1, 0),
            "disk_mb": Figure("on disk, MB", 1, 0),
            "memory_mb": Figure("memory, MB", 1, 0),
            "first_answer_seconds": Figure("first answer, s", 1, 2),
        },
        where={"sort": "crossbatch", "part": "all items", "dimension": "128"},
        pair="sort",
    ),
    "graphs": Table(
        groups={"items": "items", "dimension": "dimension", "kind": "index"},
        figures={
            "recall": Figure("recall@10", 1, 4),
            "microseconds": Figure("µs of a query", 1, 0),
            "breadth": Figure("breadth", 1, 0),
            "build_seconds": Figure("built in s", 1, 0),
            "memory_mb": Figure("memory, MB", 1, 0),
        },
        pair="items",
        counted=False,
    ),
    "peers": Table(
        groups={"in_flight": "in flight", "server": "server, and what it gets"},
        figures={
            "ratio": Figure("÷ plain loop", 1, 3),
            "images_per_second": Figure("images/s", 1, 0),
            "p50_ms": Figure("p50 ms", 1, 1),
            "p95_ms": Figure("p95 ms", 1, 1),
        },
        pair="round",
    ),
    "metrics": Table(
        groups={"case": "set of the size of", "package": "package"},
        figures={
            "seconds": Figure("seconds", 1, 2),
            "mebibytes": Figure("MiB", 1, 0),
            "R@1": Figure("R@1", 100, 3),
            "MAP@R": Figure("MAP@R", 100, 3),
        },
        pair="package",
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
    "queries": Table(
        groups={"items": "items", "dimension": "dimension"},
        figures={
            "queries_per_second_1": Figure("queries/s of a core", 1, 0),
            "p99_ms_1": Figure("p99 ms", 1, 2),
            "bytes": Figure("bytes an item", 1, 0),
        },
        where={"contestant": "crossbatch auto", "part": "all items"},
        source="benchmarks/results/sizes.csv",
        pair="sort",
        derived={"bytes": lambda run: 1e6 * float(run["disk_mb"]) / int(run["items"])},
        counted=False,
    ),
    "replicas": Table(
        groups={"servers": "servers", "load": "of the peak"},
        figures={
            "offered": Figure("offered/s", 1, 0),
            "answered": Figure("answered/s", 1, 0),
            "p50_ms": Figure("p50 ms", 1, 1),
            "p99_ms": Figure("p99 ms", 1, 1),
            "refused": Figure("refused", 1, 0),
            "failed": Figure("failed", 1, 0),
            "servers_cores": Figure("cores: servers", 1, 2),
            "proxy_cores": Figure("Envoy", 1, 2),
            "client_cores": Figure("client", 1, 2),
            "other_cores": Figure("other work", 1, 2),
        },
        pair="model",
        counted=False,
    ),
    "parts": Table(
        groups={"part": "part", "batch": "images"},
        figures={name: Figure(f"{name.removesuffix('_ms')}, ms", 1, 2) for name in ("mean_ms", "spread_ms")},
        pair="model",
        counted=False,
    ),
    "beside": Table(
        groups={"replicas": "servers", "load": "of the peak"},
        figures={
            "measured_answered": Figure("answered/s, measured", 1, 0),
            "answered": Figure("simulated", 1, 0),
            "answered_ratio": Figure("÷", 1, 2),
            "measured_p50_ms": Figure("p50 ms, measured", 1, 1),
            "p50_ms": Figure("simulated", 1, 1),
            "p50_ms_ratio": Figure("÷", 1, 2),
            "measured_p99_ms": Figure("p99 ms, measured", 1, 1),
            "p99_ms": Figure("simulated", 1, 1),
            "p99_ms_ratio": Figure("÷", 1, 2),
        },
        where={"scenario": "beside"},
        source="benchmarks/results/simulation.csv",
        pair="scenario",
        counted=False,
    ),
    "foretold": Table(
        groups={"load": "of what they can do", "replicas": "servers"},
        figures={
            "offered": Figure("offered/s", 1, 0),
            "answered": Figure("answered/s", 1, 0),
            "p50_ms": Figure("p50 ms", 1, 1),
            "p99_ms": Figure("p99 ms", 1, 1),
            "refused": Figure("refused, %"),
        },
        where={"scenario": "replicas"},
        source="benchmarks/results/simulation.csv",
        pair="scenario",
        counted=False,
    ),
    **{
        how: Table(
            groups={"load": f"one of three {how}, at the load"},
            figures={
                "offered": Figure("offered/s", 1, 0),
                "answered": Figure("answered/s", 1, 0),
                "p50_ms": Figure("p50 ms", 1, 1),
                "p99_ms": Figure("p99 ms", 1, 1),
                "refused": Figure("refused, %"),
                "failed": Figure("failed, %", 100, 2),
            },
            where={"scenario": f"after: {how}"},
            source="benchmarks/results/simulation.csv",
            pair="scenario",
            counted=False,
        )
        for how in ("killed", "vanished")
    },
    "shards": Table(
        groups={"shards": "parts", "load": "of what they can do"},
        figures={
            "offered": Figure("queries/s", 1, 0),
            "p50_ms": Figure("p50 ms", 1, 1),
            "p99_ms": Figure("p99 ms", 1, 1),
        },
        where={"scenario": "shards"},
        source="benchmarks/results/simulation.csv",
        pair="scenario",
        counted=False,
    ),
    "plan": Table(
        groups={"step": "", "log": "by log n", "slope": "by the slope", "unit": "", "from": "from"},
        figures={},
        pair="from",
        counted=False,
    ),
    "thresholds": Table(
        groups={"step": "", "slope": "up to", "unit": "", "from": "from"},
        figures={},
        pair="from",
        counted=False,
    ),
    "two_arms": Table(groups={"arm": "arm"}, figures=_FITTED, source="docs/figures/two_arms.csv"),
    "covering": Table(
        groups={"m": "m"},
        figures={"radius": Figure("δ", 1, 2), "discrepancy": Figure("discrepancy", 1, 2)},
        source="docs/figures/covering.csv",
    ),
}


def cost_tables(dollars: float) -> dict[str, Table]:
    """Return the tables of what images, queries and items cost, at a price of a core for an hour."""

    def cores(run: Run) -> float:
        return 1.0 if "contestant" in run else 2.0  # benchmarks/search.py times on one, load.py on two

    def thousands_a_dollar(column: str) -> Callable[[Run], float]:
        return lambda run: 3.6 * float(run[column]) / (cores(run) * dollars)

    return {
        "cost_images": Table(
            groups={"model": "model", "in_flight": "in flight"},
            figures={
                "a_core": Figure("images/s a core", 1, 0),
                "a_dollar": Figure("thousand images a dollar", 1, 0),
            },
            where={"what": "embed", "in_flight": "32"},
            source="benchmarks/results/load.csv",
            pair="round",
            derived={
                "a_core": lambda run: float(run["images_per_second"]) / cores(run),
                "a_dollar": thousands_a_dollar("images_per_second"),
            },
        ),
        "cost_queries": Table(
            groups={"items": "items", "dimension": "dimension"},
            figures={
                "queries_per_second_1": Figure("queries/s a core, one a call", 1, 0),
                "queries_per_second_64": Figure("64 a call", 1, 0),
                "one": Figure("thousand queries a dollar, one a call", 1, 0),
                "many": Figure("64 a call", 1, 0),
            },
            where={"sort": "server", "part": "all items"},
            source="benchmarks/results/search.csv",
            pair="sort",
            derived={
                "one": thousands_a_dollar("queries_per_second_1"),
                "many": thousands_a_dollar("queries_per_second_64"),
            },
        ),
        "cost_items": Table(
            groups={"items": "items", "dimension": "dimension", "contestant": "index"},
            figures={
                "disk": Figure("bytes on disk an item", 1, 0),
                "memory": Figure("of memory that is not of a file", 1, 0),
                "build": Figure("µs of building an item", 1, 0),
            },
            where={"sort": "crossbatch", "part": "all items"},
            source="benchmarks/results/sizes.csv",
            pair="sort",
            derived={
                "disk": lambda run: 1e6 * float(run["disk_mb"]) / int(run["items"]),
                "memory": lambda run: 1e6 * float(run["memory_mb"]) / int(run["items"]),
                "build": lambda run: 1e6 * float(run["build_seconds"]) / int(run["items"]),
            },
        ),
    }


PRICE = 0.04
"""Dollars for a core and an hour, as clouds ask about; `--price` gives another."""
TABLES |= cost_tables(PRICE)
