"""The check of a GPU, in short and on a CPU: each line passes, and what is wrong or missing is told."""

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import Bench, check_term, checked, main
from benchmarks.train_step import CASES
from training.method import cross_batch


@pytest.mark.timeout(240)
def test_each_line_passes_on_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PRECISIONS", gpu_check.PRECISIONS[:2])  # a CPU is slow at float16
    assert main(["--device", "cpu", "--short"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()[1:]
    verdicts = [line[:8].strip() for line in lines]
    assert verdicts.count("PASS") == 4 + 6 + 2 + 2 + 1 + 1 + 1
    assert set(verdicts) == {"PASS", "left out"}


def test_the_full_size_is_that_of_the_bounds() -> None:
    told = [(case.recipe.backbone, case.recipe.image_size, case.bound) for case in CASES["full"]]
    assert told == [("resnet50", 224, 0.02), ("resnet20", 32, 0.05), ("resnet20", 32, 0.05)]
    assert all(case.recipe.xml_weight > 0 for case in CASES["full"])


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_term_in_half_precision_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = cross_batch.cross_batch_loss.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(gpu_check, "cross_batch_loss", bare)
    lines = list(checked(Bench("cpu", True, tmp_path), check_term))
    assert False in [line.passed for line in lines]
