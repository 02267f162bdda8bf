"""The command that looks after galleries: every action, the words it takes, what it prints and refuses."""

import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import crossbatch
from serving.errors import AlreadyExists, BadArtifact, BadSetting, InvalidArgument, NotFound
from serving.gallery.command import Settings, render, run
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import GalleryItem
from tests.serving.vectors import AXES, MANUAL, MODEL, sql, units

ACTIONS = get_args(Settings.model_fields["action"].annotation)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[GalleryDirectory]:
    with GalleryDirectory(tmp_path / "galleries", policy=MANUAL) as opened:
        yield opened


def filled(directory: GalleryDirectory, *names: str) -> None:
    for name in names:
        directory.create(name, **MODEL).upsert([GalleryItem("k", AXES[0], name)])


def done(directory: GalleryDirectory, *words: str, **more: Any) -> dict[str, Any]:
    given = dict(zip(("action", "name", "other"), words, strict=False))
    result = run(Settings.model_validate({**given, "galleries": directory.path, **more}))
    assert json.loads(json.dumps(result, default=list)) is not None
    return result


def command(directory: GalleryDirectory, *words: str, **more: Any) -> str:
    return render(done(directory, *words, **more))


def test_list_rebuild_info_drop(directory: GalleryDirectory) -> None:
    with pytest.raises(NotFound, match="no folder"):
        command(directory, "list")
    filled(directory, "a")
    (directory.path / "bad").mkdir()
    (directory.path / "bad" / "gallery.sqlite").write_bytes(b"x" * 5000)
    first, second = command(directory, "list").splitlines()
    assert first.startswith("a: 1 items of dimension 4, model m (ffffffffffff); exact index over 0, 1 newer")
    assert second.startswith("bad: the gallery file")
    assert command(directory, "rebuild", "a").startswith("the index of the gallery a is new\na\n")
    told = command(directory, "info", "a")
    for words in ("1 of dimension 4; 0 newer", "exact over 1 items (wanted: auto)", "1.0000 (wanted: 0.99)"):
        assert words in told
    assert "previous" not in told
    with pytest.raises(BadArtifact):
        command(directory, "info", "bad")
    for name, many in (("a", "1"), ("bad", "unknown number")):
        with pytest.raises(BadSetting, match=f"{many}.*; add --yes"):
            command(directory, "drop", name)
        assert command(directory, "drop", name, yes=True) == f"dropped the gallery {name}"
    assert command(directory, "list") == "no gallery"
    with pytest.raises(NotFound):
        command(directory, "drop", "a", yes=True)


def test_info_names_the_fields_that_a_filter_can_ask_for(directory: GalleryDirectory) -> None:
    gallery = directory.create("a", **MODEL, thumbnail_side=96)
    told = command(directory, "info", "a")
    assert "  fields" not in told
    assert re.search(r"thumbnails +of 96 pixels\n", told)
    gallery.upsert([GalleryItem("a", AXES[0], "label", metadata={"price": 3, "brand": "acme"})])
    gallery.upsert([GalleryItem("b", AXES[1], metadata={"price": "on demand", "box": {"x": 1}})])
    assert "box (object), brand (string), price (number or string)\n" in command(directory, "info", "a")
    gallery.upsert([GalleryItem("c", AXES[2], metadata={f"field{i:02}": True for i in range(50)})])
    assert "field37 (boolean) and 13 more\n" in command(directory, "info", "a")


def test_a_rebuild_of_another_type(directory: GalleryDirectory) -> None:
    directory.create("a", **MODEL).upsert([GalleryItem(f"k{i}", row) for i, row in enumerate(units(300, 4))])
    told = command(directory, "rebuild", "a", index="HNSW8,Flat", recall=0.9)
    assert "HNSW8,Flat" in told
    assert "(wanted: 0.9)" in told
    assert "(wanted: exact)" in command(directory, "rebuild", "a", index="exact")
    with pytest.raises(InvalidArgument, match="nonsense"):
        command(directory, "rebuild", "a", index="nonsense")
    with pytest.raises(BadSetting, match="for rebuild alone"):
        command(directory, "info", "a", index="exact")


def test_switch_and_rollback(directory: GalleryDirectory) -> None:
    filled(directory, "birds", "new")
    assert command(directory, "switch", "birds", "new") == (
        "the gallery new is now birds, and the one before is new; "
        f"to undo it: crossbatch gallery rollback birds --galleries {directory.path}"
    )
    assert directory.get("birds").get(["k"])[0].label == "new"
    assert "new (by rollback it is back)" in command(directory, "info", "birds")
    with pytest.raises(AlreadyExists):
        command(directory, "switch", "birds", "new")
    assert "the gallery birds is again the one before; the other is now new" in command(
        directory, "rollback", "birds"
    )
    assert directory.get("birds").get(["k"])[0].label == "birds"
    assert command(directory, "switch", "free", "new") == "the gallery new is now free"
    assert directory.names() == ["birds", "free"]


def test_snapshot_and_restore(directory: GalleryDirectory, tmp_path: Path) -> None:
    filled(directory, "birds")
    file = str(tmp_path / "birds.snapshot")
    told = command(directory, "snapshot", "birds", file)
    assert told.startswith(f"wrote the 1 items of the gallery birds to {file} (0.")
    assert command(directory, "restore", file, "again") == f"made the gallery again with 1 items of {file}"
    assert directory.get("again").get(["k"])[0].label == "birds"
    for name in ("../a", "/etc", ".hidden", "a/b"):
        with pytest.raises(InvalidArgument, match="cannot name a gallery"):
            command(directory, "restore", file, name)
    with GalleryDirectory(tmp_path / "elsewhere") as elsewhere:
        command(elsewhere, "restore", file, "birds")  # on a new machine: the folder is made
        assert elsewhere.names() == ["birds"]


def test_verify_ends_with_a_sentence_where_there_is_a_problem(
    directory: GalleryDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(directory, "birds")
    words = ["gallery", "verify", "birds", "--galleries", str(directory.path)]
    assert crossbatch.main(words) == 0
    told = "1 items (0 in the index, 1 newer, 0 removals), 0 thumbnails; no problem"
    assert capsys.readouterr().out == f"verified the gallery birds: {told}\n"
    sql(directory.path / "birds", "UPDATE items SET label = 'x'")
    assert crossbatch.main(words) == 2
    shown = capsys.readouterr()
    assert "'k': its checksum is not that" in shown.out
    assert shown.out.endswith("\n1 problem\n")
    assert "crossbatch gallery: the gallery birds is damaged; restore it" in shown.err
    assert crossbatch.main([*words, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", "YES\n", "n\n", "\n", ""])
def test_drop_asks_on_a_terminal(
    directory: GalleryDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
) -> None:
    filled(directory, "birds")
    gone = "y" in answer.lower()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert command(directory, "drop", "birds") == f"{'dropped' if gone else 'kept'} the gallery birds"
    assert capsys.readouterr().err == "drop the gallery birds with 1 items for good? [y/N] "
    assert directory.names() == ([] if gone else ["birds"])


@pytest.mark.parametrize("action", ACTIONS)
def test_words_too_few_or_too_many(directory: GalleryDirectory, action: str) -> None:
    two = ("snapshot", "restore", "switch", "export", "import", "copy", "publish", "follow")
    wanted = 0 if action == "list" else 2 if action in two else 1
    for words in {0, 1, 2} - {wanted}:
        with pytest.raises(BadSetting, match=f": crossbatch gallery {action}( [A-Z]+){{{wanted}}}$"):
            command(directory, action, *["a", "b"][:words], yes=True)


AS_ANOTHER = """
import json, os, sys
import crossbatch
import serving.gallery.command
from serving.gallery.index.index import require_faiss

require_faiss()  # from a place that the other user may not read
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for words in json.loads(sys.argv[1]):
    print("->", crossbatch.main(["gallery", *words, "--yes", "--galleries", sys.argv[2]]), flush=True)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
        for path in [path for path in Path(name).rglob("*") if path.is_dir()]:
            path.chmod(0o755)


def test_a_read_only_folder(open_folder: Path) -> None:
    """As another user than root, whom no right stops."""
    galleries, file, out = open_folder / "galleries", open_folder / "file", open_folder / "out"
    with GalleryDirectory(galleries, policy=MANUAL) as directory:
        filled(directory, "birds", "new")
        command(directory, "snapshot", "birds", str(file))
        for path in [galleries, *galleries.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        out.mkdir()
        out.chmod(0o777)
        words = [
            ("list",), ("info", "birds"), ("verify", "birds"), ("snapshot", "birds", f"{out}/x"),
            ("rebuild", "birds"), ("restore", str(file), "more"), ("switch", "birds", "new"),
            ("switch", "free", "new"), ("drop", "birds"),
        ]  # fmt: skip
        arguments = [sys.executable, "-c", AS_ANOTHER, json.dumps(words), str(directory.path)]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=True)
    statuses = [int(line[3:]) for line in ended.stdout.splitlines() if line.startswith("-> ")]
    assert statuses == [0, 0, 0, 0, 2, 2, 2, 2, 2], ended
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("crossbatch gallery:")]
    assert len(sentences) == 5
    assert all("read-only" in line or "permission denied" in line for line in sentences), sentences
