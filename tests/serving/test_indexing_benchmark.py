"""The benchmark of indexing, in short: all three kinds of runs embed every image, and a ratio is told."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import indexing


def test_a_ratio_to_the_plain_loop_is_told_and_data_with_a_bad_image_refused(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(model), str(data), "--threads", "2", "--rounds", "2"])
    indexing.main()
    told = capsys.readouterr().out
    assert "tiny, 20 images, 2 threads, 2 rounds" in told
    assert len(re.findall(r"\d+\.\d images/s \(\d+\.\d to \d+\.\d\)", told)) == 3
    assert len(re.findall(r"ratio \d+\.\d{3} \(\d+\.\d{3} to \d+\.\d{3}\)", told)) == 2
    seconds = {indexing.PLAIN: [1.0, 2.0], indexing.STORED: [2.0, 2.5]}
    assert indexing.ratios(seconds, indexing.STORED) == [0.5, 0.8]
    (data / "class0/bad.jpg").write_bytes(b"text")
    with pytest.raises(SystemExit):
        indexing.main()
