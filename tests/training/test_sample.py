"""The sample of a large data set: by class, seeded, never more than asked for."""

from collections import Counter
from pathlib import Path

from serving.catalog.catalog import Row
from serving.catalog.picture import File
from training.data.sample import draw_sample


def _rows(classes: int, images: int) -> list[Row]:
    return [Row(f"{c:03}/{i:03}", File(Path("x")), f"{c:03}") for c in range(classes) for i in range(images)]


def test_all_where_they_fit() -> None:
    rows = _rows(3, 4)
    assert draw_sample(rows, most=12, seed=0) == tuple(rows)


def test_small_classes_come_whole() -> None:
    found = draw_sample(_rows(200, 5), most=100, seed=0)
    assert set(Counter(row.label for row in found).values()) == {2}  # 100 // 100 is below a pair
    found = draw_sample(_rows(200, 5), most=600, seed=0)
    assert len(found) == 600
    assert sorted(Counter(row.label for row in found).values())[-119:] == [5] * 119
    assert [row.key for row in found] == sorted(row.key for row in found)


def test_large_classes_share_the_room() -> None:
    found = draw_sample(_rows(5, 1000), most=100, seed=0)
    assert Counter(row.label for row in found) == {f"{c:03}": 20 for c in range(5)}


def test_the_seed_draws() -> None:
    rows = _rows(20, 10)
    draws = [draw_sample(rows, most=50, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    one, other = ({row.label for row in draw_sample(_rows(200, 5), most=100, seed=seed)} for seed in (0, 1))
    assert one != other
    assert len(draw_sample(rows, most=3, seed=0)) == 3
