"""The README and the pages of docs/ are run as they stand: all Python, and the commands of four of them."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import crossbatch
from scripts.commands import page as commands_page
from tests.conftest import Serve, crossbatch_ok
from tests.serving.test_published import make_cub
from training.data.drawing import draw_catalogue

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RunHere = Callable[[list[str]], None]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, continued lines joined, comments and empty lines left out."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    lines = (shlex.join(shlex.split(line, comments=True)) for line in text.splitlines())
    return [line for line in lines if line]


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str]) -> RunHere:
    """Runs a command within this process, which has torch already; it must succeed and tell something."""

    def run(words: list[str]) -> None:
        assert crossbatch.main(words) == 0, (words, capsys.readouterr().err)
        assert capsys.readouterr().out.strip(), words

    return run


@pytest.fixture(scope="module")
def gallery(model: Path, catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("galleries") / "products"
    crossbatch_ok("index", "--model", model, "--data", catalogue, "--split", "test", path)
    return path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(
    page: Path, model: Path, photo: Path, gallery: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code = blocks(page, "python")
    names: dict[str, object] = {"model": model, "photo": photo}
    if any("address" in block for block in code):
        names |= {"address": serve(gallery.parent), "gallery": gallery.name}
    for block in code:
        exec(compile(block, str(page), "exec"), names)


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as the pages speak of, small, with settings that suit a test."""
    draw_catalogue(tmp_path / "runs/demo/pictures", classes=40, images=4, size=32)
    first = min((tmp_path / "runs/demo/pictures").rglob("*.jpg"))
    shutil.copy(first, tmp_path / "runs/demo/query.jpg")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("CROSSBATCH_SERVE_PORT", str(port))
    monkeypatch.setenv("CROSSBATCH_SEARCH_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(page: str, run_here: RunHere) -> set[str]:
    """Run the commands of a page, each server until the end; return which there were, and actions."""
    done, running = set(), list[subprocess.Popen[str]]()
    try:
        for command in commands(ROOT / page):
            program, *words = shlex.split(command)
            if program != "crossbatch" or words[0] == "demo":
                continue
            if words[0] == "train":
                words += ["--set", "epochs=1"]
            if words[0] == "serve":
                line = [sys.executable, "-m", "crossbatch", *words]
                running.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
                assert "127.0.0.1" in next(iter(running[-1].stdout or ()))
            else:
                run_here(words)
            done.add(words[1] if words[0] == "gallery" else words[0])
    finally:
        for server in running:
            server.terminate()
            server.communicate(timeout=20)
    return done


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_commands_run(page: str, at_home: Path, run_here: RunHere) -> None:
    assert "serve" in run_all(page, run_here)


QUICK = {
    "train": ["epochs=1", "image_size=64", "dimension=16", "workers=0", "threads=1"],
    "small": ["weights=none", "backbone=resnet20"],
    "published": ["image_size=32", "batches_per_epoch=1", "classes_per_batch=4", "images_per_class=2"],
}


@pytest.mark.timeout(300)
def test_the_training_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: RunHere) -> None:
    draw_catalogue(tmp_path / "photos", classes=12, images=10, size=64)
    make_cub(tmp_path / "CUB_200_2011", {number: f"Bird_{number}" for number in range(93, 104)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second, *_, last = sorted(path.relative_to("photos") for path in Path("photos").rglob("*.*"))
    Path("marks.csv").write_text(f"query,result,relevant\n{first},{second},1\n{first},{last},0\n")
    done = set()
    for command in commands(ROOT / "docs/training.md"):
        program, *words = shlex.split(command)
        if program == "torchrun":  # tests/training/test_processes.py has several processes
            assert words[:4] == ["--nproc-per-node", "2", "-m", "crossbatch"]
            words = words[4:]
        elif program != "crossbatch":
            continue
        if words[0] in ("train", "mlrc", "sweep") and "--data" in words:
            quick = QUICK["train"] + (QUICK["published"] if "/" in words[1] else [])
            if "runs/photos" not in words:  # which is measured, shown and exported with its own backbone
                quick += QUICK["small"]
            words += [word for change in quick for word in ("--set", change)]
        run_here(words)
        done.add(words[0])
    assert done == {"train", "sweep", "mlrc", "evaluate", "report", "export"}
    assert (tmp_path / "runs/photos/report.html").is_file()
    assert list((tmp_path / "runs/curves/tensorboard").iterdir())
    assert "repeat1" in {path.name for path in (tmp_path / "runs/cub-contrastive").iterdir()}


@pytest.mark.timeout(300)
def test_the_galleries_page_runs(model: Path, catalogue: Path, at_home: Path, run_here: RunHere) -> None:
    shutil.copy(model, at_home / "model.onnx")
    (at_home / "photos").symlink_to(catalogue)
    shutil.copy(min(catalogue.rglob("*.jpg")), at_home / "photo.jpg")
    (at_home / "shared").mkdir()
    done = run_all("docs/galleries.md", run_here)
    actions = {"list", "info", "verify", "rebuild", "snapshot", "restore", "switch", "rollback", "drop"}
    actions |= {"duplicates", "export", "import", "copy", "map", "publish", "follow"}
    assert done == {"index", "embed", "serve", "search", *actions}


def test_the_page_of_commands_is_what_the_settings_make() -> None:
    assert (ROOT / "docs/commands.md").read_text() == commands_page(), "run `python scripts/commands.py`"


def test_every_script_named_in_a_page_exists() -> None:
    for page in PAGES:
        for command in commands(page):
            first = shlex.split(command)[0]
            known = {"crossbatch", "pip", "git", "cd", "docker", "tensorboard", "torchrun", "ray"}
            assert first in known or os.access(ROOT / first, os.X_OK), command
