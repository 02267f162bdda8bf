"""The figures: the first is what its script draws, the second, in short, shows two runs side by side."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import covering
from benchmarks.two_arms import main
from serving.errors import BadSetting
from tests.training.small import Train, draw_folder, read_table
from training.evaluation import evaluate

SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_covering_is_what_its_script_draws_and_the_lemma_holds_on_it(tmp_path: Path) -> None:
    for found in (covering.cover(count, seed=5) for count in covering.COUNTS):
        assert 0 < found.discrepancy <= found.radius
    covering.main(["--out", str(tmp_path)])
    folders = tmp_path, covering.ROOT / "docs/figures"
    made, kept = (np.loadtxt(folder / "covering.csv", delimiter=",", skiprows=1) for folder in folders)
    np.testing.assert_allclose(made, kept, atol=2e-4)  # another processor rounds otherwise
    drawn, committed = (
        [each.tag for each in ElementTree.parse(folder / "covering.svg").iter()] for folder in folders
    )
    assert drawn == committed


@pytest.fixture(scope="module")
def runs(train: Train, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("arms")
    data = draw_folder(root / "data", classes=10, images=5)
    without = ["xml_weight=0", "reconstruction_weight=1"]
    for name, given in {"random": without[:1], "without": without, "with": ["xml_weight=0.3"]}.items():
        train(root / name, "epochs=1", *given, data=data)
    return [root / "without", root / "with"]


def test_two_runs_stand_side_by_side(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "arms.svg"
    words = [*map(str, runs), "--out", str(out), "--halvings", "5"]
    main([*words, "--images", "2", "--credit", "drawn"])
    tree = ElementTree.parse(out)
    assert len(list(tree.iter(f"{SVG}image"))) == 4  # two of each arm, each held once
    words_told = {each.text for each in tree.iter(f"{SVG}text")}
    assert {"without XML", "with XML", "5 unseen classes", "drawn"} <= words_told
    for row, run in zip(read_table(out.with_suffix(".csv")), runs, strict=True):
        found = evaluate.run(evaluate.Settings(target=run, fitted=5))
        found["recall_at_1"] = found["recall_at"]["1"]
        for name in ("map_at_r", "map_c", "map_x", "recall_at_1", "halvings"):
            assert float(row[name]) == pytest.approx(found[name], abs=1e-6)
    first = out.read_bytes()
    main(words)
    assert b"<image" in first
    assert b"<image" not in out.read_bytes()


def test_unlike_runs_are_told(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*map(str, runs), "--out", str(tmp_path / "arms.svg"), "--images", "1"])
    assert "--credit" in capsys.readouterr().err
    with pytest.raises(BadSetting, match="reconstruction_weight"):
        main([str(runs[0].parent / "random"), str(runs[1]), "--out", str(tmp_path / "arms.svg")])
