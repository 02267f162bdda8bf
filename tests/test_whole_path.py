"""The whole path at a small scale: what is served is what was trained and measured."""

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import crossbatch
import training.demo
from benchmarks.live_recall import live_recall
from serving.catalog.catalog import read, select
from serving.client.client import Client
from serving.model.spec import read_spec
from tests.conftest import Serve, crossbatch_ok
from training.demo import render


def result_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    capsys.readouterr()
    crossbatch_ok(*words)
    return json.loads(capsys.readouterr().out)


def test_live_searches_count_the_recall_that_evaluate_measures(
    trained: Path, model: Path, catalogue: Path, serve: Serve, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    measured = result_of(capsys, "evaluate", trained, "--data", catalogue)
    by_torch = measured["recall_at"]
    assert measured["map_at_r"] > measured["untrained"]["map_at_r"]  # training is worth it even here
    by_file = result_of(capsys, "evaluate", model, "--data", catalogue)["recall_at"]
    assert by_torch == by_file
    crossbatch_ok("index", "--model", model, "--data", catalogue, "--split", "test", tmp_path / "unseen")
    rows = select(read(catalogue), "test", read_spec(model).split)
    with Client(serve(tmp_path), timeout=60) as client:
        found, queries = live_recall(client, "unseen", rows)
    assert queries == len(rows) == 96
    assert found / queries == pytest.approx(by_torch["1"], abs=1e-3)


@pytest.mark.timeout(300)
def test_the_demo_runs_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_process, begun = training.demo._crossbatch, set[str | Path]()

    def crossbatch_here(*words: str | Path) -> Any:
        """Train in a process of its own, and do the rest in this one, where torch is loaded."""
        begun.add(words[0])
        return as_process(*words) if words[0] == "train" else result_of(capsys, *words)

    monkeypatch.setattr(training.demo, "_crossbatch", crossbatch_here)
    words = ("demo", "--out", tmp_path / "demo", "--classes", "40", "--images", "4", "--epochs", "1")
    found = result_of(capsys, *words)
    assert set(found["metrics"]) == {"trained", "untrained"}
    assert len(found["hits"]) == 5
    assert {"map_x", "map_y"} <= found["hits"][0]["metadata"].keys()
    assert "nearest neighbours" in render(found).lower()
    assert begun == {"train", "evaluate", "export", "index", "search"}


@pytest.mark.parametrize("desktop", [True, False])
def test_the_demo_ends_with_its_page_until_it_is_told_to(
    model: Path, catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], desktop: bool,
) -> None:  # fmt: skip
    crossbatch_ok(
        "index", "--model", model, "--data", catalogue, "--thumbnails", tmp_path / "galleries/products"
    )
    shutil.copy(model, tmp_path / "model.onnx")
    result, shown = {"out": str(tmp_path), "page": True}, []

    def look(place: str) -> None:
        with urllib.request.urlopen(f"{place}v1/galleries/products") as reply:
            shown.append(json.load(reply)["gallery"])
        raise KeyboardInterrupt

    def leave(process: "subprocess.Popen[str]", *_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    capsys.readouterr()
    training.demo.stay(result)  # there is no terminal: it must not hang
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    training.demo.stay(result | {"page": False})
    assert capsys.readouterr().out == ""
    for name in ("WAYLAND_DISPLAY", "BROWSER", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if desktop:
        monkeypatch.setenv("DISPLAY", ":0")
        monkeypatch.setattr("webbrowser.open", look)
    else:
        monkeypatch.setattr("webbrowser.open", None)  # which nobody calls
        monkeypatch.setattr("subprocess.Popen.wait", leave)
    training.demo.stay(result)
    assert "http://127.0.0.1:" in capsys.readouterr().out
    assert [each["thumbnail_side"] for each in shown] == ([256] if desktop else [])


def test_the_demo_leaves_a_strangers_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert crossbatch.main(["demo", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert "--out" in capsys.readouterr().err
