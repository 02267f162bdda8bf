"""The first figure: the lemma holds on what it draws, and the committed files are its own."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from benchmarks.covering import COUNTS, ROOT, cover, main


def test_the_committed_figure_is_what_the_script_draws(tmp_path: Path) -> None:
    for found in (cover(count, seed=5) for count in COUNTS):
        assert 0 < found.discrepancy <= found.radius
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
