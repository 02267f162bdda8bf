"""The tables of the results: the committed ones are what their runs give, and a broken copy is found out."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks import sizes, tables
from benchmarks.layout import TABLES, Figure, Table
from benchmarks.tables import PAGES
from training.evaluation.paired import interval

ROOT = Path(__file__).resolve().parent.parent

RUNS = """loss,xml_weight,seed,map_at_r,seconds,map_c
contrastive,0,0,0.46,10,
contrastive,0,1,0.47,11,
contrastive,0,2,0.45,12,
contrastive,0.3,2,0.47,20,0.3
contrastive,0.3,0,0.48,20,0.2
contrastive,0.3,1,0.488,20,0.1
triplet,0,7,0.4,9,
triplet,0.3,7,0.39,9,0.5
"""
TABLE = Table(
    groups={"loss": "loss", "xml_weight": "λ"},
    figures={"map_at_r": Figure("MAP@R"), "map_c": Figure("MAP_c"), "seconds": Figure("seconds", 1, 0)},
    baseline={"xml_weight": "0"},
)


WHOLE = "<!-- table arms --><!-- end -->"


def made(tmp_path: Path, text: str = WHOLE, runs: str = RUNS, table: Table = TABLE) -> str:
    (tmp_path / "benchmarks/results").mkdir(parents=True, exist_ok=True)
    (tmp_path / "benchmarks/results/arms.csv").write_text(runs)
    (tmp_path / "page.md").write_text(text)
    return tables.stale(tmp_path, {"arms": table}, ["page.md"])[tmp_path / "page.md"]


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")
    ]


def test_the_committed_pages_are_what_their_runs_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_each_table_stands_on_a_page() -> None:
    text = "".join((ROOT / name).read_text() for name in PAGES)
    for name in TABLES:
        assert any(f"<!-- {kind} {name}" in text for kind in ("table", "figure", "difference")), name


def test_a_broken_copy_is_named_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, page = made(tmp_path), tmp_path / "page.md"
    monkeypatch.setattr(tables, "stale", partial(tables.stale, tables={"arms": TABLE}, pages=["page.md"]))
    page.write_text(right.replace("46.0", "99.9", 1))
    assert tables.main(["--check"], root=tmp_path) == 1
    assert capsys.readouterr().out == "page.md: table arms differs from its runs\n"
    assert tables.main([], root=tmp_path) == 0
    assert page.read_text() == right
    assert tables.main(["--check"], root=tmp_path) == 0


def test_rows_are_means_with_intervals_and_paired_differences(tmp_path: Path) -> None:
    head, rule, plain, better, one, worse = cells(made(tmp_path))
    assert head == ["loss", "λ", "runs", "MAP@R", "Δ MAP@R", "MAP_c", "Δ MAP_c", "seconds", "Δ seconds"]
    assert rule == ["---", "---", *["---:"] * 7]
    mean, half = interval([48, 48.8, 47])
    difference, reach = interval([48, 48.8, 47], [46, 47, 45])  # by seed, whatever the order of the file
    assert half is not None
    assert reach is not None
    assert plain == ["contrastive", "0", "3", "46.0 ± 2.5", "", "–", "", "11 ± 2", ""]
    assert better[3] == f"{mean:.1f} ± {half:.1f}"
    assert better[4] == f"{difference:+.1f} ({difference - reach:+.1f} to {difference + reach:+.1f})"
    assert better[5:7] == ["20.0 ± 24.8", "–"]
    assert one[3] == "40.0"
    assert worse[3:5] == ["39.0", "-1.0"]


def test_single_figures_stand_in_a_sentence(tmp_path: Path) -> None:
    text = (
        "It brings <!-- difference arms map_at_r loss=triplet xml_weight=0.3 -->?<!-- end --> to"
        " <!-- figure arms map_at_r loss=triplet xml_weight=0.3 -->?<!-- end --> points."
    )
    assert made(tmp_path, text).replace(" -->", "<!--").split("<!--")[2::4] == ["-1.0", "39.0"]


def test_some_runs_alone_can_be_shown_and_pairs_can_share_another_column(tmp_path: Path) -> None:
    shown = {"xml_weight": "λ"}, {"map_at_r": Figure("MAP@R")}
    alone = made(tmp_path, table=Table(*shown, where={"loss": "triplet"}))
    assert cells(alone)[2:] == [["0", "1", "40.0"], ["0.3", "1", "39.0"]]
    table = Table(*shown, baseline={"xml_weight": "0"}, where={"seed": "0"}, pair="loss")
    text = made(tmp_path, runs=RUNS.replace(",7,", ",0,"), table=table)
    difference, reach = interval([48, 39], [46, 40])
    assert reach is not None
    assert cells(text)[3][3] == f"{difference:+.1f} ({difference - reach:+.1f} to {difference + reach:+.1f})"


@pytest.mark.parametrize(
    ("text", "runs", "told"),
    [
        ("<!-- table other --><!-- end -->", RUNS, "no table 'other'"),
        ("<!-- table arms -->", RUNS, "does not end"),
        ("<!-- figure arms map_at_r loss=triplet --><!-- end -->", RUNS, "2 rows are meant"),
        ("<!-- figure arms other loss=triplet xml_weight=0 --><!-- end -->", RUNS, "other"),
        (WHOLE, RUNS.replace("seconds", "minutes"), "no column seconds"),
        (WHOLE, RUNS + "triplet,0.3,7,0.39,9,0.5\n", "two runs of seed 7"),
        (WHOLE, RUNS + "triplet,0.3,8,0.39,9,0.5\n", "are not those of"),
        (WHOLE, RUNS + "libc,0.3,8,0.39,9,0.5\n", "has no baseline libc 0"),
        (WHOLE, RUNS.replace("0.47,11,", "0.47,,"), "could not convert"),
        (WHOLE, RUNS.splitlines()[0], "no such runs"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, text: str, runs: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made(tmp_path, text, runs)


def test_columns_that_are_worked_out_stand_beside_those_of_the_runs(tmp_path: Path) -> None:
    table = Table(
        groups={"loss": "loss"},
        figures={"an_hour": Figure("an hour", 1, 1)},
        where={"loss": "contrastive", "xml_weight": "0"},
        derived={"an_hour": lambda run: 3600 * float(run["map_at_r"]) / float(run["seconds"])},
    )
    text = made(tmp_path, table=table)
    expected, half = interval([3600 * 0.46 / 10, 3600 * 0.47 / 11, 3600 * 0.45 / 12])
    assert half is not None
    assert cells(text)[2] == ["contrastive", "3", f"{expected:.1f} ± {half:.1f}"]


def test_costs_are_told_for_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    def per_dollar(price: str) -> list[float]:
        assert tables.main(["--price", price]) == 0
        shown = cells(capsys.readouterr().out)
        return [float(row[-1].split()[0]) for row in shown if row[0].startswith("resnet-50")]

    (dear,), (cheap,) = per_dollar("0.5"), per_dollar("0.05")
    assert cheap == pytest.approx(10 * dear, rel=0.02)


def test_the_figure_of_sizes_is_of_the_committed_runs(tmp_path: Path) -> None:
    sizes.main(["--out", str(tmp_path / "sizes.svg")])
    assert (tmp_path / "sizes.svg").read_bytes() == (ROOT / "docs/figures/sizes.svg").read_bytes()
