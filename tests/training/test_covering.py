"""The first figure: the lemma holds on what it draws, by a naive loop; the committed files are its own."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.covering import COUNTS, ROOT, cover, main


@pytest.mark.parametrize("count", COUNTS)
def test_prototypes_rebuild_the_mean_to_within_the_radius(count: int) -> None:
    found = cover(count, seed=5)
    nearest = [
        min(range(count), key=lambda i, x=x: float(np.hypot(*(found.prototypes[i] - x))))  # type: ignore[misc]
        for x in found.locations
    ]
    assert found.chosen.tolist() == nearest
    away = [np.hypot(*(found.prototypes[i] - x)) for x, i in zip(found.locations, nearest, strict=True)]
    assert found.radius == pytest.approx(max(away))
    rebuilt = np.mean([found.prototypes[i] for i in nearest], axis=0)
    assert found.rebuilt == pytest.approx(rebuilt)
    assert found.discrepancy == pytest.approx(np.hypot(*(rebuilt - found.locations.mean(axis=0))))
    assert found.discrepancy <= found.radius


def test_the_committed_figure_is_what_the_script_draws(tmp_path: Path) -> None:
    main(["--out", str(tmp_path)])
    made, kept = (
        np.loadtxt(folder / "covering.csv", delimiter=",", skiprows=1)
        for folder in (tmp_path, ROOT / "docs/figures")
    )
    np.testing.assert_allclose(made, kept, atol=2e-4)  # another processor rounds otherwise
    drawn, committed = (
        ElementTree.parse(folder / "covering.svg").getroot() for folder in (tmp_path, ROOT / "docs/figures")
    )
    assert [each.tag for each in drawn.iter()] == [each.tag for each in committed.iter()]
