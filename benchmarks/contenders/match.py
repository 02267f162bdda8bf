"""All contenders over the same vectors: built, opened, brought to the same recall, and timed in turns."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contender import SHARDS
from benchmarks.contenders.embeddings import Nearest, nearest, recall, shards
from benchmarks.contenders.process import Failed, Process

__all__ = ["BATCHES", "PASSES", "Contestant", "K", "Match", "Row", "Rules"]

K = 10
BATCHES = (1, 64)
PASSES = (1, 10, 50)
"""Percentages of the items that the filters let through."""
_DELETED = 0.05


@dataclass(frozen=True)
class Contestant:
    """Who takes part, and how its process is started."""

    title: str
    sort: str
    """`crossbatch`, `server`, `library` or `store`."""
    worker: str
    folder: str
    python: str
    filters: bool
    """Whether it is measured with filters, too."""
    changes: bool
    """Whether it is measured after changes, too."""


@dataclass(frozen=True)
class Rules:
    """What holds for all."""

    recall: float
    """The recall@10 wanted."""
    rounds: int
    seconds: float
    """How long each is timed in a round, for each size of batch."""
    cores: int
    """That each may use while it is timed, its server included."""
    patience: float
    """Seconds until a request that is not answered is given up."""
    highest: int
    """Value of a search parameter above which none is tried."""
    brief: bool
    """Whether filters and changes are left out."""


@dataclass
class Row:
    """What was measured of one; `failed` says why nothing more was.

    `plain`, an entry of `filtered` (by percentage) and `changed` hold `recall`, the `setting` of the search
    parameter (none where there is no ladder), and by size of batch the medians of all rounds.
    """

    contestant: Contestant
    failed: str = ""
    built: dict[str, Any] = field(default_factory=dict)
    first_answer_seconds: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    filtered: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    def kept(self) -> Iterator[dict[str, object]]:
        """Yield what is kept of each part: all items, those that a filter lets through, and after changes."""
        needs = {
            "build_seconds": sum(self.built.get(name, 0.0) for name in ("load_seconds", "index_seconds")),
            "disk_mb": self.built.get("disk_bytes", 0) / 1e6,
            "memory_mb": self.memory.get("anonymous_bytes", 0) / 1e6,
            "first_answer_seconds": self.first_answer_seconds,
            "built": self.built.get("about", ""),
        }
        filtered = {f"filter lets {percent} % through": figures for percent, figures in self.filtered.items()}
        for part, figures in {"all items": self.plain, **filtered, "after changes": self.changed}.items():
            of_batch = {batch: figures[str(batch)] for batch in BATCHES if str(batch) in figures}
            if not of_batch:
                continue
            told = {"contestant": self.contestant.title, "sort": self.contestant.sort, "part": part}
            yield {
                **told,
                "recall": figures["recall"],
                **{
                    f"{name}_{batch}": values[name]
                    for batch, values in of_batch.items()
                    for name in ("queries_per_second", "p50_ms", "p99_ms")
                },
                "setting": figures.get("setting"),
                **(needs if part == "all items" else {}),
            }


@dataclass
class _Player:
    row: Row
    process: Process
    ladder: list[int]


class Match:
    """One set of vectors, and everyone who searches it."""

    def __init__(
        self,
        folder: Path,
        vectors: Path,
        queries: Path,
        *,
        fresh: int,
        rules: Rules,
        tell: Callable[[str], None],
    ) -> None:
        """Take files of unit vectors; the last `fresh` of the items are stored only after all else."""
        self._folder = folder
        self._vectors_file, self._queries_file = vectors, queries
        self._vectors: NDArray[np.float32] = np.load(vectors, mmap_mode="r")
        self._queries: NDArray[np.float32] = np.load(queries)
        self._fresh = fresh
        self._count = len(self._vectors) - fresh
        self._rules = rules
        self._tell = tell

    def play(self, contestants: Sequence[Contestant]) -> list[Row]:
        """Measure all; one that fails has a row that says why, and the others go on."""
        rows = [Row(contestant) for contestant in contestants]
        for row in rows:
            with _noted(row):
                self._build(row)
        with ExitStack() as stack:
            players: list[_Player] = []
            for row in _standing(rows):
                with _noted(row):
                    players.append(self._open(row, stack))
            everything = np.ones(self._count, np.bool_)
            self._compare([(player, player.row.plain) for player in players], everything)
            for player in players:
                if not player.row.failed:
                    with _noted(player.row):
                        player.row.memory = player.process.ask("memory")
            if self._rules.brief:
                return rows
            able = [player for player in players if player.row.contestant.filters]
            for below in PASSES:
                figures = [(player, player.row.filtered.setdefault(str(below), {})) for player in able]
                self._compare(figures, shards(self._count) < below * SHARDS // 100, below=below)
            self._change([player for player in players if player.row.contestant.changes])
        return rows

    def _build(self, row: Row) -> None:
        if row.contestant.sort == "server":  # of a gallery that is there
            return
        self._tell(f"building {row.contestant.title}")
        with self._start(row.contestant, cores=0) as process:
            row.built = process.ask("build", vectors=str(self._vectors_file), count=self._count)

    def _open(self, row: Row, stack: ExitStack) -> _Player:
        self._tell(f"opening {row.contestant.title}")
        began = time.perf_counter()
        process = stack.enter_context(self._start(row.contestant, cores=self._rules.cores))
        ladder = process.ask("open", queries=str(self._queries_file))["ladder"]
        row.first_answer_seconds = time.perf_counter() - began
        return _Player(row, process, ladder)

    def _change(self, players: Sequence[_Player]) -> None:
        """Store the fresh items, delete a share of the others, and compare again."""
        deleted = np.random.default_rng(2).permutation(self._count)[: round(_DELETED * self._count)]
        allowed = np.ones(self._count + self._fresh, np.bool_)
        allowed[deleted] = False
        for player in players:
            if not player.row.failed:
                self._tell(f"changing {player.row.contestant.title}")
                with _noted(player.row):
                    options = {"first": self._count, "count": self._fresh, "deleted": deleted.tolist()}
                    player.row.changed |= player.process.ask(
                        "change", vectors=str(self._vectors_file), **options
                    )
        self._compare([(player, player.row.changed) for player in players], allowed)

    def _compare(
        self,
        players: Sequence[tuple[_Player, dict[str, Any]]],
        allowed: NDArray[np.bool_],
        *,
        below: int | None = None,
    ) -> None:
        """Bring all to the recall that the first reaches, or to the wanted one if that is less; time them."""
        vectors = self._vectors[: len(allowed)]
        wanted = nearest(vectors, self._queries, allowed, k=K)
        target = self._rules.recall
        for player, figures in players:
            if not player.row.failed:
                self._tell(f"asking {player.row.contestant.title}")
                with _noted(player.row):
                    self._climb(player, figures, vectors, wanted, target, below)
                if player is players[0][0] and figures:
                    target = min(target, figures["recall"])
        self._take_turns(players, below)

    def _climb(
        self,
        player: _Player,
        figures: dict[str, Any],
        vectors: NDArray[np.float32],
        wanted: Nearest,
        target: float,
        below: int | None,
    ) -> None:
        """Find the least value of the ladder that reaches the recall; the highest where none does."""
        allowed = [value for value in player.ladder if value <= self._rules.highest]
        ladder: Sequence[int | None] = allowed or [None]

        def try_out(place: int) -> bool:
            setting = ladder[place]
            if setting is not None:
                player.process.ask("set", value=setting)
            found = player.process.ask("answer", k=K, below=below)["found"]
            figures.update(setting=setting, recall=recall(found, vectors, self._queries, wanted))
            return bool(figures["recall"] >= target)

        least, most = 0, len(ladder) - 1
        while least < most:  # recall grows with the value
            middle = (least + most) // 2
            least, most = (least, middle) if try_out(middle) else (middle + 1, most)
        try_out(least)

    def _take_turns(self, players: Sequence[tuple[_Player, dict[str, Any]]], below: int | None) -> None:
        taken: dict[tuple[int, int], list[dict[str, float]]] = {}
        for number in range(self._rules.rounds):
            self._tell(f"round {number + 1} of {self._rules.rounds}")
            for place, (player, _) in enumerate(players):
                for batch in BATCHES:
                    if player.row.failed:
                        break
                    with _noted(player.row):
                        options = {"k": K, "batch": batch, "seconds": self._rules.seconds, "below": below}
                        told = player.process.ask("time", **options)
                        taken.setdefault((place, batch), []).append(told)
        for (place, batch), rounds in taken.items():
            medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            players[place][1][str(batch)] = medians

    def _start(self, contestant: Contestant, *, cores: int) -> Process:
        return Process(
            contestant.worker,
            self._folder / contestant.folder,
            python=contestant.python,
            cores=cores,
            patience=self._rules.patience,
        )


@contextmanager
def _noted(row: Row) -> Iterator[None]:
    try:
        yield
    except Failed as error:
        row.failed = str(error)


def _standing(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if not row.failed)
