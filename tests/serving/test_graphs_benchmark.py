"""The benchmark of graphs, in short."""

import csv
from pathlib import Path

import pytest

from benchmarks import graphs


def test_each_kind_is_measured_at_the_recall_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["panorama", "HNSW16,SQ8,RFlat", "PCA16,HNSW16,SQ8,RFlat"]
    words = ["--count", "2000", "--dimension", "32", "--rounds", "1", "--recall", "0.95"]
    assert graphs.main([*words, "--csv", str(tmp_path / "found.csv"), "--kinds", *kinds, "PCA,none"]) == 0
    with (tmp_path / "found.csv").open(newline="") as file:
        *rows, wrong = csv.DictReader(file)
    assert [row["kind"] for row in rows] == kinds
    for row in rows:
        assert 0.95 <= float(row["recall"]) <= 1
        assert float(row["microseconds"]) > 0
        assert float(row["memory_mb"]) > 0
    assert wrong["note"] == "ended with 1"
    assert "kind panorama | " in capsys.readouterr().out
