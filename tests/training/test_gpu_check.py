"""The check of a GPU, in short and on a CPU: each line passes, and what is wrong or missing is told."""

from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Bench, check_term, checked, main
from training.method import cross_batch


@pytest.mark.timeout(240)
def test_each_line_passes_on_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PRECISIONS", gpu_check.PRECISIONS[:2])  # a CPU is slow at float16
    assert main(["--device", "cpu", "--short"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()[1:]
    verdicts = [line[:8].strip() for line in lines]
    assert verdicts.count("PASS") == 4 + 6 + 2 + 2 + 1 + 1 + 1
    assert set(verdicts) == {"PASS", "left out"}


def test_a_term_in_half_precision_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = cross_batch.cross_batch_loss.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(gpu_check, "cross_batch_loss", bare)
    lines = list(checked(Bench("cpu", True, tmp_path), check_term))
    assert False in [line.passed for line in lines]
