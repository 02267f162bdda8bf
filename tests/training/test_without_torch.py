"""`evaluate MODEL.onnx` where nothing that trains is installed, beside the same with torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.small import draw_folder
from training.evaluation.evaluate import Settings, run

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import sys
for name in ("torch", "torchvision", "timm", "lightning_fabric", "pytorch_metric_learning", "safetensors",
             "scipy", "sklearn", "yaml", "onnxscript", "huggingface_hub", "tensorboard"):
    sys.modules[name] = None  # an import of it fails
import crossbatch
sys.exit(crossbatch.main())
"""


def _bare(*words: str | Path, command: str = "evaluate") -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-c", BARE, command, *map(str, words)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_model_file_has_the_same_figures_with_torch_and_without(model: Path, tmp_path: Path) -> None:
    root = draw_folder(tmp_path / "images", classes=8, images=6, size=18)
    images = sorted(root.rglob("*.png"))
    lines = [
        f"{path.relative_to(root)},{path.parent.name},{('query', 'gallery')[i % 2]},{i // 2}"
        for i, path in enumerate(images)
    ]
    (root / "table.csv").write_text("\n".join(["path,label,split,burst", *lines, ""]))
    for options in ({}, {"protocol": "query-gallery", "exclude_same": "burst"}):
        given = Settings(target=model, data=root, split="all", **options)
        expected = run(given)
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        done = _bare(model, "--data", root, "--split", "all", "--json", *words)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["recall_at"] == pytest.approx(expected["recall_at"], abs=1e-6)
        for name in ("map_at_r", "r_precision"):
            assert 0 < found[name] == pytest.approx(expected[name], abs=1e-6)
        for name in ("images", "queries", "excluded", "gallery", "protocol", "exclude_same"):
            assert found[name] == expected[name]


def test_what_needs_torch_says_so_in_a_sentence(model: Path, whole: Path, data: Path) -> None:
    for words in ((model, "--data", data, "--clusters"), (model, "--data", data, "--fitted", "2"), (whole,)):
        done = _bare(*words)
        assert done.returncode == 2
        assert "is needed and not installed: pip install" in done.stderr
        assert "Embedding" not in done.stderr  # before the minutes that it takes
        assert len(done.stderr.splitlines()) == 1


def test_the_demo_fails_before_it_draws_anything(tmp_path: Path) -> None:
    done = _bare("--out", tmp_path / "demo", command="demo")
    told = "crossbatch demo: The package 'torch' is needed and not installed: pip install"
    assert (done.returncode, done.stderr.startswith(told), [*tmp_path.iterdir()]) == (2, True, [])
    assert len(done.stderr.splitlines()) == 1
