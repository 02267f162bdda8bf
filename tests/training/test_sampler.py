"""The P×K sampler: coverage, and an order that seed and epoch decide alone; the sample of rows."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.catalog.catalog import Row
from serving.catalog.picture import File
from training.data.sampler import PKSampler, draw_sample

SIZES = st.lists(st.integers(1, 13), min_size=1, max_size=9)


@settings(deadline=None, max_examples=100)
@given(SIZES, st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_an_epoch_uses_every_image_in_batches_of_p_by_k(sizes: list[int], p: int, k: int, seed: int) -> None:
    p = min(p, len(sizes))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    sampler = PKSampler(labels, classes_per_batch=p, images_per_class=k, seed=seed)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    for batch in batches:
        groups = labels[np.array(batch)].reshape(p, k)
        assert (groups == groups[:, :1]).all()
        assert len(set(groups[:, 0])) == p
        for group, c in zip(np.array(batch).reshape(p, k), groups[:, 0], strict=True):
            assert len(set(group)) == min(k, sizes[c])  # repeats only where the class is smaller than K
    assert {image for batch in batches for image in batch} == set(range(len(labels)))


def test_the_order_is_that_of_seed_and_epoch() -> None:
    labels = np.repeat(np.arange(6), 7)

    def order(seed: int, *epochs: int) -> list[list[list[int]]]:
        sampler, found = PKSampler(labels, classes_per_batch=3, images_per_class=2, seed=seed), []
        for sampler.epoch in epochs:
            found.append(list(sampler))
        return found

    assert order(2, 0, 1)[1:] == order(2, 1)
    assert len({str(epoch) for seed in range(3) for epoch in order(seed, 0, 1, 2)}) == 9


@pytest.mark.parametrize("batches", [None, 1, 3, 25])
def test_an_epoch_has_a_given_number_of_batches_or_no_more_than_it_must(batches: int | None) -> None:
    labels = np.repeat(np.arange(10), 20)
    sampler = PKSampler(labels, classes_per_batch=5, images_per_class=4, batches=batches)
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == (batches or 10)
    seen = Counter(image for batch in drawn for image in batch)
    assert max(seen.values()) - min(seen[i] for i in range(200)) <= 1  # no image twice before all have come
    assert len({str(batch) for batch in drawn}) == len(drawn)


def _rows(classes: int, images: int) -> list[Row]:
    return [Row(f"{c:03}/{i:03}", File(Path("x")), f"{c:03}") for c in range(classes) for i in range(images)]


def test_all_rows_come_where_they_fit_and_small_classes_whole() -> None:
    rows = _rows(3, 4)
    assert draw_sample(rows, most=12, seed=0) == tuple(rows)
    found = draw_sample(_rows(200, 5), most=100, seed=0)
    assert set(Counter(row.label for row in found).values()) == {2}  # 100 // 100 is below a pair
    found = draw_sample(_rows(200, 5), most=600, seed=0)
    assert len(found) == 600
    assert sorted(Counter(row.label for row in found).values())[-119:] == [5] * 119
    assert [row.key for row in found] == sorted(row.key for row in found)


def test_large_classes_share_the_room_and_the_seed_draws() -> None:
    found = draw_sample(_rows(5, 1000), most=100, seed=0)
    assert Counter(row.label for row in found) == {f"{c:03}": 20 for c in range(5)}
    assert len(draw_sample(_rows(20, 10), most=50, seed=0)) == 40  # an even share of the room, rounded down
    draws = [draw_sample(_rows(200, 5), most=100, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert {row.label for row in draws[0]} != {row.label for row in draws[2]}
