"""A gallery is a dictionary with exact search: Hypothesis drives both, and looks for a difference."""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from serving.errors import AlreadyExists, Conflict, CrossbatchError, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem, RebuildPolicy
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range
from serving.gallery.verify import verify

DIMENSION = 8
NAMES = ("shop", "spring", "autumn")
KEYS = [f"{letter}/{number}" for letter in "aé" for number in range(8)]
# Few vectors for many items, so that scores tie; a tie is broken by key.
POOL = np.random.default_rng(0).standard_normal((6, DIMENSION)).astype(np.float32)
POOL /= np.linalg.norm(POOL, axis=1, keepdims=True)


@dataclass
class Known:
    """What the dictionary knows of one gallery."""

    index: str
    items: dict[str, GalleryItem] = field(default_factory=dict)
    previous: "tuple[str, Known] | None" = None


keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
names = st.sampled_from(NAMES)
processes = st.integers(0, 1)
metadata = st.fixed_dictionaries(
    {}, optional={"colour": st.sampled_from(["red", "blue"]), "price": st.integers(0, 3)}
)
items = st.builds(
    lambda key, vector, label, more: GalleryItem(key, POOL[vector], label, f"{key}.jpg", more),
    st.sampled_from(KEYS),
    st.integers(0, len(POOL) - 1),
    st.sampled_from(["", "x", "y"]),
    metadata,
)
conditions: st.SearchStrategy[Filter] = st.one_of(
    st.builds(Equal, st.just("colour"), st.sampled_from(["red", "blue", "green"])),
    st.builds(Equal, st.just("$label"), st.sampled_from(["x", "y"])),
    st.builds(In, st.just("price"), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    st.builds(Range, st.just("price"), least=st.integers(0, 3), below=st.integers(0, 4)),
    st.builds(Exists, st.sampled_from(["colour", "price", "nobody"])),
)
several = st.lists(conditions | st.builds(Not, conditions), max_size=3).map(tuple)
searches = st.fixed_dictionaries(
    {
        "k": st.integers(1, 20),
        "minimum_score": st.none() | st.floats(-1, 1, width=32),
        "exclude": st.lists(st.sampled_from(KEYS), max_size=3),
        "filter": st.none() | conditions | st.builds(AllOf, several) | st.builds(AnyOf, several),
        "group_by_label": st.booleans(),
    }
)


def holds(condition: Filter, item: GalleryItem) -> bool:
    """The oracle of filters, for the metadata of this test."""
    fields: Mapping[str, Any] = {**item.metadata, **({"$label": item.label} if item.label else {})}
    match condition:
        case Equal(name, value):
            return name in fields and fields[name] == value
        case In(name, among):
            return name in fields and fields[name] in among
        case Range(name, None, least, below, None):
            assert least is not None
            assert below is not None
            return name in fields and least <= fields[name] < below
        case Exists(name):
            return name in fields
        case AllOf(inner):
            return all(holds(each, item) for each in inner)
        case AnyOf(inner):
            return any(holds(each, item) for each in inner)
        case Not(inner):
            return not holds(inner, item)
    raise AssertionError(condition)


def ranked(known: Known, query: NDArray[np.float32], **asked: Any) -> list[tuple[str, float]]:
    """The oracle of searches: every item that is asked for, best first."""
    condition, minimum = asked.get("filter"), asked.get("minimum_score")
    scored = [
        (key, float(np.float32((item.vector * query.astype(np.float64)).sum())))
        for key, item in known.items.items()
        if key not in asked.get("exclude", ()) and (condition is None or holds(condition, item))
    ]
    right = sorted(scored, key=lambda pair: (-pair[1], pair[0]))
    right = [(key, score) for key, score in right if minimum is None or score >= minimum]
    if not asked.get("group_by_label"):
        return right
    best: dict[str, tuple[str, float]] = {}
    for key, score in right:
        best.setdefault(known.items[key].label or f"without {key}", (key, score))
    return list(best.values())


class GalleryMachine(RuleBasedStateMachine):
    """Two open folders of the same galleries stand for two processes; each rule is carried out by one."""

    approximate: frozenset[str] = frozenset()
    """The kinds of index that may miss some; of so few items most answers are exact with any."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.known: dict[str, Known] = {}
        self.open = [self.opened(), self.opened()]

    def opened(self) -> GalleryDirectory:
        # Rebuilt in the background after a few changes, so that rebuilds run beside every other rule.
        return GalleryDirectory(self.folder, policy=RebuildPolicy(least=6, share=0.2))

    def teardown(self) -> None:
        for directory in self.open:
            directory.close()
        shutil.rmtree(self.folder)

    @initialize(index=st.sampled_from(["auto", "exact", "HNSW8,SQ8,RFlat"]))
    def first(self, index: str) -> None:
        self.create(0, "shop", index)

    @rule(who=processes, name=names, index=st.sampled_from(["auto", "exact", "HNSW8,Flat"]))
    def create(self, who: int, name: str, index: str) -> None:
        expected = pytest.raises(AlreadyExists) if name in self.known else nullcontext()
        with expected:
            self.open[who].create(
                name, model_name="m", fingerprint="f" * 64, dimension=DIMENSION, index=index
            )
            self.known[name] = Known(index)

    @rule(
        who=processes,
        name=names,
        items=st.lists(items, min_size=1, max_size=8, unique_by=lambda item: item.key),
        expecting=st.sampled_from([None, "right", "wrong"]),
    )
    def upsert(self, who: int, name: str, items: list[GalleryItem], expecting: str | None) -> None:
        known = self.known.get(name)
        if known is None:
            with pytest.raises(NotFound):
                self.open[who].get(name)
            return
        expected = None
        if expecting is not None:
            there = known.items
            expected = {each.key: there[each.key].version if each.key in there else 0 for each in items}
        upsert = partial(Gallery.upsert, items=items, expected=expected)
        if expected and expecting == "wrong":
            expected[items[-1].key] += 1
            with pytest.raises(Conflict):
                self.open[who].using(name, upsert)
            return
        versions = self.open[who].using(name, upsert)
        newest = max((item.version for item in known.items.values()), default=0)
        assert len(versions) == len(items)
        assert min(versions) > newest
        assert versions == sorted(set(versions))
        for item, version in zip(items, versions, strict=True):
            known.items[item.key] = replace(item, version=version)

    @rule(who=processes, name=names, keys=keys)
    def delete(self, who: int, name: str, keys: list[str]) -> None:
        if known := self.known.get(name):
            deleted = self.open[who].using(name, lambda gallery: gallery.delete(keys))
            assert deleted == sum(known.items.pop(key, None) is not None for key in keys)

    @rule(
        who=processes,
        name=names,
        queries=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=3),
        asked=searches,
    )
    def search(self, who: int, name: str, queries: list[int], asked: dict[str, Any]) -> None:
        known = self.known.get(name)
        if known is None:
            return
        k, grouped = asked["k"], asked["group_by_label"]
        found = self.open[who].using(name, partial(Gallery.search, vectors=POOL[queries], **asked))
        assert len(found) == len(queries)
        for query, hits in zip(POOL[queries], found, strict=True):
            if known.index in self.approximate:
                right = ranked(known, query, **asked | {"group_by_label": False})
                labels = [hit.label for hit in hits if hit.label]
                assert not grouped or len(labels) == len(set(labels))
                assert {(hit.key, hit.score) for hit in hits} <= set(right)
                assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.key))[:k]
            else:
                assert [(hit.key, hit.score) for hit in hits] == ranked(known, query, **asked)[:k]
            for hit in hits:
                item = known.items[hit.key]
                assert (hit.label, hit.uri, hit.metadata) == (item.label, item.uri, item.metadata)

    @rule(who=processes, name=names, keys=keys)
    def get(self, who: int, name: str, keys: list[str]) -> None:
        if known := self.known.get(name):
            if set(keys) <= known.items.keys():
                found = self.open[who].using(name, lambda gallery: gallery.get(keys))
                assert [(item.key, item.version, item.metadata) for item in found] == [
                    (key, known.items[key].version, known.items[key].metadata) for key in keys
                ]
            else:
                with pytest.raises(NotFound):
                    self.open[who].using(name, lambda gallery: gallery.get(keys))

    @rule(who=processes, name=names, limit=st.integers(1, 5), prefix=st.sampled_from(["", "a", "é/"]))
    def pages(self, who: int, name: str, limit: int, prefix: str) -> None:
        if known := self.known.get(name):
            found: list[str] = []
            after: str | None = ""
            while after is not None:
                page = self.open[who].using(
                    name, partial(Gallery.list, after=after, limit=limit, prefix=prefix)
                )
                found += [item.key for item in page]
                after = found[-1] if page else None
            assert found == sorted(key for key in known.items if key.startswith(prefix))

    @rule(who=processes, name=names)
    def rebuild(self, who: int, name: str) -> None:
        if self.known.get(name):
            self.open[who].using(name, lambda gallery: gallery.rebuild())

    @rule(who=processes)
    def restart(self, who: int) -> None:
        self.open[who].close()
        self.open[who] = self.opened()

    @rule(who=processes, name=names, other=names)
    def switch(self, who: int, name: str, other: str) -> None:
        taken, taking = self.known.get(name), self.known.get(other)
        if taking is None or name == other:
            return
        if taken is None:
            self.open[who].switch(name, other)
            taking.previous = None
            self.known[name] = self.known.pop(other)
            return
        if taken.previous is not None and taken.previous == (other, taking):
            with pytest.raises(CrossbatchError, match="rollback"):  # a second request of the same
                self.open[who].switch(name, other)
            return
        self.open[who].switch(name, other)
        taking.previous = (other, taken)
        self.known[name], self.known[other] = taking, taken

    @rule(who=processes, name=names)
    def rollback(self, who: int, name: str) -> None:
        current = self.known.get(name)
        if current is None:
            return
        if current.previous is None or self.known.get(current.previous[0]) is not current.previous[1]:
            with pytest.raises(CrossbatchError):
                self.open[who].rollback(name)
            return
        other, before = current.previous
        assert self.open[who].rollback(name) == other
        self.known[name], self.known[other] = before, current

    @rule(who=processes, name=st.sampled_from(NAMES[1:]))
    def drop(self, who: int, name: str) -> None:
        if self.known.pop(name, None) is not None:
            self.open[who].drop(name)

    @invariant()
    def names_are_those_known(self) -> None:
        for directory in self.open:
            assert directory.names() == sorted(self.known)

    @rule(who=processes, name=names)
    def verified(self, who: int, name: str) -> None:
        if known := self.known.get(name):
            report = verify(self.folder / name)
            assert report.problems == []
            assert self.open[who].using(name, lambda gallery: gallery.info()).items == len(known.items)


class ApproximateMachine(GalleryMachine):
    """The same where candidates come from the index, however few items there are."""

    approximate = frozenset({"HNSW8,SQ8,RFlat", "HNSW8,Flat"})


def run(machine: type[RuleBasedStateMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.timeout(120)
def test_gallery_is_a_dictionary_with_exact_search() -> None:
    run(GalleryMachine, 40)


@pytest.mark.timeout(120)
def test_what_an_approximate_index_finds_is_there_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gallery.search.segment._LARGE", 0.25)  # most often one looks at all
    monkeypatch.setattr("serving.gallery.search.segment._VISITED", 0)
    run(ApproximateMachine, 25)
