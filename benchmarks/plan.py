"""How many machines a catalogue takes, and their cost: `python benchmarks/plan.py --items N --rate QUERIES`.

All is computed from the CSVs in benchmarks/results: bytes of an item and seconds of a search from the
largest gallery that was measured (sizes.csv), what a call costs beside them (search.csv), images a second of
a core (load.csv). Beyond that gallery a search in a graph may take longer in two ways, and both are shown: in
proportion to the logarithm of the items, as theory has it (Malkov and Yashunin, 2018), or by the power of the
items that the last two sizes lie on, as far memory is slower than theory knows. The second is the safe one.

Every query asks each part of the gallery. Each part lies on as many machines as its share of the queries
takes and one more, which may be lost; two at least. The plan of docs/scaling.md is written by --write.
"""

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.driving.figures import median, write_csv
from benchmarks.layout import PRICE

__all__ = ["Measured", "Wanted", "main", "measured", "plan", "thresholds"]

RESULTS: Final = Path(__file__).resolve().parent / "results"
_FILLED: Final = 0.8  # of a machine's memory, by galleries
_NIGHT: Final = 8.0  # hours
_MONTH: Final = 730.0
_COPIES: Final = 2
Growth = Literal["log", "slope"]
Row = dict[str, object]


@dataclass(frozen=True)
class Wanted:
    """What is asked for, and of which machines."""

    items: int = 100_000_000
    rate: float = 5_000.0
    """Queries a second."""
    cores: int = 16
    memory: float = 128.0
    """Of a machine, in GB of 10^9 bytes."""
    price: float = PRICE
    """Dollars for a core and an hour."""
    load: float = 0.6
    """The share of a core that is used."""


@dataclass(frozen=True)
class Measured:
    """What the runs say."""

    items: int
    """Of the largest gallery."""
    bytes_an_item: float
    build_seconds: float
    """Of an item of it."""
    search: float
    """Seconds of a processor that a search in it takes."""
    slope: float
    """By which power of the items searches take longer, from the last size to it."""
    handling: float
    """Seconds of a processor that a call by gRPC takes beside the search, its client's among them."""
    images: float
    """A second of a core, that come by gRPC and are embedded."""

    def seconds(self, items: float, growth: Growth) -> float:
        """Return how long a search in so many items takes."""
        if growth == "log":
            return self.search * math.log(items) / math.log(self.items)
        return self.search * (items / self.items) ** self.slope


def measured(model: str, results: Path = RESULTS) -> Measured:
    """Read what the plan needs.

    Raises:
        ValueError: The model was not measured.
    """
    sizes = sorted(
        (row for row in _read(results / "sizes.csv") if row["contestant"] == "crossbatch auto"),
        key=lambda row: int(row["items"]),
    )
    before, last = sizes[-2:]
    items, rate = int(last["items"]), float(last["queries_per_second_1"])
    slope = math.log(float(before["queries_per_second_1"]) / rate) / math.log(items / int(before["items"]))
    plain = [row for row in _read(results / "search.csv") if row["part"] == "all items"]
    million = {row["contestant"]: row for row in plain if row["items"] == "1000000"}
    bare, served = (
        float(million[f"crossbatch auto{way}"]["queries_per_second_1"]) for way in ("", " by gRPC")
    )
    images = [
        float(row["images_per_second"]) / float(row["threads"])
        for row in _read(results / "load.csv")
        if (row["model"], row["what"], row["in_flight"]) == (model, "embed", "32")
    ]
    if not images:
        names = sorted({row["model"] for row in _read(results / "load.csv")})
        raise ValueError(f"load.csv has no runs of {model}; it has those of {', '.join(names)}")
    return Measured(
        items=items,
        bytes_an_item=1e6 * float(last["disk_mb"]) / items,
        build_seconds=float(last["build_seconds"]) / items,
        search=1 / rate,
        slope=slope,
        handling=1 / served - 1 / bare,
        images=median(images),
    )


def plan(found: Measured, wanted: Wanted) -> Iterator[Row]:
    """Work the plan out, step by step, for both ways in which searches may grow."""
    memory = found.bytes_an_item * wanted.items
    parts = math.ceil(memory / (1e9 * wanted.memory * _FILLED))
    growths: tuple[Growth, ...] = ("log", "slope")
    searches = [found.seconds(wanted.items / parts, growth) for growth in growths]
    queries = [1 / (each + found.handling) for each in searches]
    cores = [wanted.rate * parts / each / wanted.load for each in queries]
    copies = [max(_COPIES, math.ceil(each / parts / wanted.cores) + 1) for each in cores]
    machines = [parts * each for each in copies]
    dollars = wanted.cores * wanted.price
    embedding = wanted.rate / found.images / wanted.load
    embedders = math.ceil(embedding / wanted.cores) + 1
    core_hours = wanted.items / found.images / 3600
    yield _row("memory of an item", "bytes", "on disk, by which it is mapped", found.bytes_an_item)
    yield _row("memory of all", "GB", "× items", memory / 1e9)
    yield _row("parts of the gallery", "", f"÷ {wanted.memory:g} GB × {_FILLED:g}, rounded up", parts)
    yield _row(
        "search in a part", "ms of a core", "extrapolated by its items", *(1e3 * each for each in searches)
    )
    yield _row("handling of a call", "ms of a core", "by gRPC less in the process", 1e3 * found.handling)
    yield _row("queries a core", "a second", "1 ÷ (search + handling)", *queries)
    yield _row("cores that search", "", f"queries × parts ÷ queries a core ÷ {wanted.load:g}", *cores)
    yield _row("machines a part", "", f"÷ parts ÷ {wanted.cores}, and one more", *copies)
    yield _row("machines that search", "", "× parts", *machines)
    yield _row("cost of searching", "$ an hour", "× cores × price", *(each * dollars for each in machines))
    yield _row(
        "cost of searching", "$ a month", f"× {_MONTH:g}", *(each * dollars * _MONTH for each in machines)
    )
    yield _row("cores that embed queries", "", f"queries ÷ images a core ÷ {wanted.load:g}", embedding)
    yield _row("machines that embed queries", "", f"÷ {wanted.cores}, and one more", embedders)
    yield _row("cost of embedding queries", "$ a month", "as above", embedders * dollars * _MONTH)
    yield _row("embedding all items once", "core hours", "items ÷ images a core", core_hours)
    yield _row("the same on 10 machines", "hours", f"÷ 10 ÷ {wanted.cores}", core_hours / 10 / wanted.cores)
    yield _row("cost of it", "$", "core hours × price", core_hours * wanted.price)
    built = found.build_seconds * wanted.items / parts / 3600
    yield _row("building the index of a part", "hours", "as an item of the largest measured takes", built)


def thresholds(found: Measured, wanted: Wanted) -> Iterator[Row]:
    """Work out up to where each way of running is enough."""
    one = 1 / found.handling * wanted.load
    search = found.search + found.handling
    fit = 1e9 * wanted.memory * _FILLED / found.bytes_an_item
    busy = f"× {wanted.load:g}"
    yield _row("handling of a call", "ms of a core", "by gRPC less in the process", 1e3 * found.handling)
    yield _row("one process", "calls/s", f"1 ÷ handling of a call {busy}", one)
    yield _row("one process", "cores that embed", "the same ÷ images a core", one / found.images)
    yield _row(
        "one machine",
        "queries/s",
        f"{wanted.cores} cores × queries a core of {found.items:,} items {busy}",
        wanted.cores / search * wanted.load,
    )
    yield _row(
        "one machine",
        "images/s",
        f"{wanted.cores} cores × images a core {busy}",
        wanted.cores * found.images * wanted.load,
    )
    yield _row("one machine", "items", f"{wanted.memory:g} GB × {_FILLED:g} ÷ memory of an item", fit)
    night = found.images * wanted.cores * _NIGHT * 3600
    yield _row(
        "index on one machine",
        "images a night",
        f"{wanted.cores} cores × images a core × {_NIGHT:g} h",
        night,
    )


def _row(step: str, unit: str, how: str, log: float, slope: float | None = None) -> Row:
    return {
        "step": step,
        "unit": unit,
        "log": _figure(log),
        "slope": _figure(log if slope is None else slope),
        "from": how,
    }


def _figure(value: float) -> str:
    """Write a figure with three digits, or a count as it is."""
    if isinstance(value, int) or value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}" if not isinstance(value, int) else f"{value:,}"
    return f"{value:.3g}"


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main(words: Sequence[str] | None = None) -> None:
    """Print the plan, or write the one of the page."""
    usual = Wanted()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=usual.items)
    parser.add_argument("--rate", type=float, default=usual.rate, help="queries a second")
    parser.add_argument("--cores", type=int, default=usual.cores, help="of a machine")
    parser.add_argument("--memory", type=float, default=usual.memory, help="of a machine in GB")
    parser.add_argument("--price", type=float, default=usual.price, help="dollars for a core and an hour")
    parser.add_argument("--load", type=float, default=usual.load, help="share of a core that is used")
    parser.add_argument("--model", default="efficientnet-lite0-224", help="as load.csv names it")
    parser.add_argument("--write", type=Path, help="folder to write plan.csv and thresholds.csv to")
    given = vars(parser.parse_args(words))
    folder = given.pop("write")
    try:
        found = measured(given.pop("model"))
    except ValueError as error:
        parser.error(str(error))
    wanted = Wanted(**given)
    for name, rows in (("plan", plan(found, wanted)), ("thresholds", thresholds(found, wanted))):
        told = list(rows)
        if folder:
            (folder / f"{name}.csv").unlink(missing_ok=True)
            write_csv(folder / f"{name}.csv", told)
        else:
            print(f"\n{name}\n\n{'':30}{'by log n':>14}{'by the slope':>14}")
            for row in told:
                print(f"{row['step']:30}{row['log']:>14}{row['slope']:>14}  {row['unit']:17}{row['from']}")


if __name__ == "__main__":
    main()
