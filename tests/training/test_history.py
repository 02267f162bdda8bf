"""The reading of metrics.csv, sound or not."""

from pathlib import Path

import pytest

from serving.errors import BadArtifact
from training.loop.history import History, read_history
from training.loop.run import write_metrics


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"epoch": 0, "map_at_r": 0.5}, {"epoch": 1, "loss": 2.5, "map_at_r": 0.75}])
    found = read_history(tmp_path)
    assert found.names == ["map_at_r", "loss"]
    assert found.points("map_at_r") == [(0, 0.5), (1, 0.75)]
    assert found.points("loss") == [(1, 2.5)]
    assert found.points("nothing") == []


def test_only_finite_numbers_count(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,loss,note,\n2,nan,good,1\n1,inf,,\n,3,,\nx,4,,\n3,1.5,7,,8,9\n3,1.25\n"
    )
    found = read_history(tmp_path)
    assert found.rows == ({"epoch": 1}, {"epoch": 2}, {"epoch": 3, "loss": 1.25})


@pytest.mark.parametrize("text", ["", "epoch,loss\n", "loss\n1\n"])
def test_an_empty_history(tmp_path: Path, text: str) -> None:
    assert read_history(tmp_path).rows == ()
    (tmp_path / "metrics.csv").write_text(text)
    assert read_history(tmp_path).rows == ()


def test_damage_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"epoch,loss\n\xff\xfe,1\n")
    with pytest.raises(BadArtifact, match=r"metrics.csv is damaged: it is not a readable table"):
        read_history(tmp_path)
    (tmp_path / "metrics.csv").write_text("epoch\n" + "1" * 200_000)
    with pytest.raises(BadArtifact, match="damaged"):
        read_history(tmp_path)


def test_a_long_history_is_thinned() -> None:
    history = History(tuple({"epoch": float(i)} for i in range(1001)))
    assert [row["epoch"] for row in history.thinned(11).rows] == [100 * i for i in range(11)]
    assert history.thinned(1001) is history
