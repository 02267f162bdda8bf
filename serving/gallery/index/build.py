"""Giving the vectors of a gallery the index that is wanted, and measuring what it became."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from serving.gallery.index.candidates import tried
from serving.gallery.index.draft import Draft, Untrainable
from serving.gallery.index.factory import full_type
from serving.gallery.index.kind import AUTOMATIC, EXACT, Facts, Trial
from serving.gallery.index.tuning import Tuning, latency_ms, prepared, tuned

__all__ = ["Advance", "build_index", "measure_again"]

Advance = Callable[[str, int, int], None]
"""Called with stage, done and total as work goes on; what it raises ends the work."""


def build_index(draft: Draft, *, wanted: str, wanted_recall: float, advance: Advance) -> Facts:
    """Make of the vectors in a draft the index that is wanted.

    Args:
        draft: The vectors.
        wanted: "auto", "exact" or a FAISS factory string.
        wanted_recall: The recall at 10 that an automatic choice must reach and parameters aim at.
        advance: Told of progress.

    Returns:
        What it became and does.

    Raises:
        InvalidArgument: The factory string cannot be the type of this index.
    """
    began = time.monotonic()
    trials: list[Trial] = []
    if wanted == AUTOMATIC:
        types, trials = tried(draft.matrix, wanted_recall, threads=draft.threads, advance=advance)
    else:
        types = [full_type(wanted, dimension=draft.dimension), EXACT]
    note = ""
    for type_ in types:
        try:
            draft.become(type_, advance)
        except Untrainable as error:
            note = str(error)
            continue
        advance("measure", 0, 1)
        tuning, queries = _tuning(draft, type_, wanted_recall)
        advance("measure", 1, 1)
        if wanted != AUTOMATIC or tuning.recall >= wanted_recall:
            break  # at last by the exact index
    return Facts(
        type=type_,
        wanted=wanted,
        wanted_recall=wanted_recall,
        recall=tuning.recall,
        queries=queries,
        latency_ms=tuning.latency_ms,
        parameters=tuning.parameters,
        trials=tuple(trials),
        note=note,
        count=len(draft),
        build_seconds=round(time.monotonic() - began, 3),
    )


def measure_again(draft: Draft, facts: Facts, *, added: int) -> Facts:
    """Return the facts of an index that was added to; its parameters change only if they must.

    Args:
        draft: The index.
        facts: Those before.
        added: How many vectors have been added since.
    """
    tuning, queries = _tuning(draft, facts.type, facts.wanted_recall, first=facts.parameters)
    return replace(
        facts,
        recall=tuning.recall,
        queries=queries,
        latency_ms=tuning.latency_ms,
        parameters=tuning.parameters,
        extended=facts.extended + added,
    )


def _tuning(
    draft: Draft, type_: str, wanted_recall: float, *, first: Mapping[str, float] | None = None
) -> tuple[Tuning, int]:
    """Return what an index of a type does, and with how many queries its recall was measured."""
    if type_ == EXACT:
        return Tuning(1.0, latency_ms(draft), {}), 0
    exam = prepared(draft)
    return tuned(draft, exam, wanted_recall, first=first), len(exam.queries)
