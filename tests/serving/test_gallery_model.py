"""A gallery is a dictionary with exact search: Hypothesis drives both, and looks for a difference."""

import shutil
import tempfile
from collections.abc import Sequence
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
from tests.serving.test_filter import holds
from tests.serving.vectors import MEMORY, MODEL, units

DIMENSION = 8
NAMES = ("shop", "spring", "autumn")
KEYS = [f"{letter}/{number}" for letter in "aé" for number in range(8)]
# Few vectors for many items, so that scores tie; a tie is broken by key.
POOL = units(6, DIMENSION)


@dataclass
class Known:
    """What the dictionary knows of one gallery."""

    items: dict[str, GalleryItem] = field(default_factory=dict)
    previous: "tuple[str, Known] | None" = None


keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
names = st.sampled_from(NAMES)
whos = st.integers(0, 1)
items = st.builds(
    GalleryItem,
    st.sampled_from(KEYS),
    st.sampled_from(list(POOL)),
    st.sampled_from(["", "x", "y"]),
    st.sampled_from(["", "a.jpg"]),
    st.fixed_dictionaries(
        {}, optional={"colour": st.sampled_from(["red", "blue"]), "price": st.integers(0, 3)}
    ),
)
filters: st.SearchStrategy[Filter] = st.sampled_from(
    [
        Equal("colour", "red"),
        Not(Equal("$label", "x")),
        In("price", (1, 3)),
        Range("price", least=1, below=3),
        AllOf((Exists("colour"), Not(Equal("price", 2)))),
        AnyOf((Equal("$label", "y"), Exists("nobody"))),
        AnyOf(()),
    ]
)


def ranked(
    known: Known,
    query: NDArray[np.float32],
    minimum_score: float = -2.0,
    exclude: Sequence[str] = (),
    filter: Filter | None = None,
    group_by_label: bool = False,
) -> list[tuple[str, float]]:
    """Return all that a search may find, best first."""
    right = []
    for key, item in known.items.items():
        score = float(np.float32((item.vector * query.astype(np.float64)).sum()))
        held = filter is None or holds(item.label, item.metadata, filter)
        if held and key not in exclude and score >= minimum_score:
            right.append((key, score))
    right.sort(key=lambda pair: (-pair[1], pair[0]))
    if not group_by_label:
        return right
    seen, kept = set[str](), []
    for key, score in right:
        label = known.items[key].label
        if not label or label not in seen:
            kept.append((key, score))
        seen.add(label)
    return kept


def told(item: GalleryItem) -> tuple[object, ...]:
    return item.key, item.version, item.label, item.uri, item.metadata, item.vector.tobytes()


class GalleryMachine(RuleBasedStateMachine):
    """Two open folders of the same galleries stand for two processes; each rule is carried out by one.

    Of so few items an answer is exact with any kind of index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
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

    @rule(who=whos, name=names, index=st.sampled_from(["auto", "exact", "HNSW8,Flat"]))
    def create(self, who: int, name: str, index: str) -> None:
        make = partial(self.open[who].create, name, **{**MODEL, "dimension": DIMENSION, "index": index})
        if name in self.known:
            with pytest.raises(AlreadyExists):
                make()
        else:
            make()
            self.known[name] = Known()

    @rule(
        who=whos,
        name=names,
        given=st.lists(items, min_size=1, max_size=8, unique_by=lambda item: item.key),
        expecting=st.sampled_from([None, "right", "wrong"]),
    )
    def upsert(self, who: int, name: str, given: list[GalleryItem], expecting: str | None) -> None:
        known = self.known.get(name)
        if known is None:
            with pytest.raises(NotFound):
                self.open[who].get(name)
            return
        expected = None
        if expecting is not None:
            there = {key: item.version for key, item in known.items.items()}
            expected = {item.key: there.get(item.key, 0) for item in given}
        store = partial(Gallery.upsert, items=given, expected=expected)
        if expected is not None and expecting == "wrong":
            expected[given[-1].key] += 1
            with pytest.raises(Conflict):
                self.open[who].using(name, store)
            return
        versions = self.open[who].using(name, store)
        newest = max((item.version for item in known.items.values()), default=0)
        assert min(versions) > newest
        assert versions == sorted(set(versions))
        for item, version in zip(given, versions, strict=True):
            known.items[item.key] = replace(item, version=version)

    @rule(who=whos, name=names, keys=keys)
    def delete(self, who: int, name: str, keys: list[str]) -> None:
        if known := self.known.get(name):
            deleted = self.open[who].using(name, lambda gallery: gallery.delete(keys))
            assert deleted == sum(known.items.pop(key, None) is not None for key in keys)

    @rule(
        who=whos,
        name=names,
        queries=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=3),
        k=st.integers(1, 20),
        asked=st.fixed_dictionaries(
            {},
            optional={
                "minimum_score": st.floats(-1, 1, width=32),
                "exclude": st.lists(st.sampled_from(KEYS), max_size=3),
                "filter": filters,
                "group_by_label": st.booleans(),
            },
        ),
    )
    def search(self, who: int, name: str, queries: list[int], k: int, asked: dict[str, Any]) -> None:
        known = self.known.get(name)
        if known is None:
            return
        search = partial(Gallery.search, vectors=POOL[queries], k=k, **asked)
        found = self.open[who].using(name, search)
        assert len(found) == len(queries)
        for query, hits in zip(POOL[queries], found, strict=True):
            assert [(hit.key, hit.score) for hit in hits] == ranked(known, query, **asked)[:k]
            for hit in hits:
                item = known.items[hit.key]
                assert (hit.label, hit.uri, hit.metadata) == (item.label, item.uri, item.metadata)

    @rule(who=whos, name=names, keys=keys)
    def get(self, who: int, name: str, keys: list[str]) -> None:
        if known := self.known.get(name):
            wanted = partial(self.open[who].using, name, lambda gallery: gallery.get(keys))
            if set(keys) <= known.items.keys():
                there = [known.items[key] for key in keys]
                assert list(map(told, wanted())) == list(map(told, there))
            else:
                with pytest.raises(NotFound):
                    wanted()

    @rule(who=whos, name=names, limit=st.integers(1, 5), prefix=st.sampled_from(["", "a", "é/"]))
    def pages(self, who: int, name: str, limit: int, prefix: str) -> None:
        if known := self.known.get(name):
            found, page = list[str](), [""]
            while page:
                ask = partial(Gallery.list, after=page[-1], limit=limit, prefix=prefix)
                page = [item.key for item in self.open[who].using(name, ask)]
                found += page
            assert found == sorted(key for key in known.items if key.startswith(prefix))

    @rule(who=whos, name=names)
    def rebuild(self, who: int, name: str) -> None:
        if self.known.get(name):
            self.open[who].using(name, lambda gallery: gallery.rebuild())

    @rule(who=whos)
    def restart(self, who: int) -> None:
        self.open[who].close()
        self.open[who] = self.opened()

    @rule(who=whos, name=names)
    def lose_the_index(self, who: int, name: str) -> None:
        """Files of the index go, and with the memory of `who` all that was read of them."""
        known = self.known.get(name)
        if known is None:
            return
        for path in (self.folder / name).glob("index-*.faiss"):
            path.unlink()
        self.restart(who)
        (hits,) = self.open[who].using(name, partial(Gallery.search, vectors=POOL[:1], k=len(KEYS)))
        assert [(hit.key, hit.score) for hit in hits] == ranked(known, POOL[0])
        self.open[who].using(name, lambda gallery: gallery.rebuild(whole=False))

    @rule(who=whos, name=names, other=names)
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

    @rule(who=whos, name=names)
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

    @rule(who=whos, name=st.sampled_from(NAMES[1:]))
    def drop(self, who: int, name: str) -> None:
        if self.known.pop(name, None) is not None:
            self.open[who].drop(name)

    @invariant()
    def names_are_those_known(self) -> None:
        for directory in self.open:
            assert directory.names() == sorted(self.known)

    @rule(who=whos, name=names)
    def verified(self, who: int, name: str) -> None:
        if known := self.known.get(name):
            report = verify(self.folder / name)
            assert report.problems == []
            assert self.open[who].using(name, lambda gallery: gallery.info()).items == len(known.items)


@pytest.mark.timeout(120)
def test_gallery_is_a_dictionary_with_exact_search() -> None:
    quiet = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(GalleryMachine, settings=settings(quiet, stateful_step_count=40))
