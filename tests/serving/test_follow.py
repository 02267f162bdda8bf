"""A gallery is published in a folder and followed there by others, which serve its old or its new state."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving import errors
from serving.gallery.command import Settings, render, run
from serving.gallery.directory import GalleryDirectory
from serving.gallery.folder import claimed
from serving.gallery.follow import follow
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.item import ItemChange
from serving.gallery.note import NOTE_NAME, read_note, write_note
from serving.gallery.publish import Manifest, publish
from serving.gallery.verify import verify
from tests.serving.processes import ROOT
from tests.serving.rpc_fakes import FakeEncoder, FakeSpec, serving, until, vector_for
from tests.serving.stubs import connected, image, item, refusal_of
from tests.serving.test_metrics import told
from tests.serving.vectors import AXES, MANUAL, MODEL, flip

EACH = 20  # items that a generation adds
KILLS = 24


class Pair:
    """A writer's gallery, the folder that it is published in, and a reader's folder of galleries."""

    def __init__(self, home: Path, **model: Any) -> None:
        self.folder, self.reader = home / "shared", home / "reader"
        self.folder.mkdir()
        self.reader.mkdir()
        self.writer = Gallery.create(home / "writer" / "birds", policy=MANUAL, **{**MODEL, **model})
        self.path = self.reader / "birds"

    def write(self, generation: int) -> None:
        """Store what shows the state of a generation: so many items, each labelled with it."""
        keys = [f"k{n}" for n in range(EACH * generation)]
        row = AXES[0] if self.writer.meta.dimension == 4 else vector_for(b"all")
        self.writer.upsert([GalleryItem(key, row, str(generation)) for key in keys])
        if generation % 3:  # else all of them are newer than the index
            self.writer.rebuild()

    def publish(self, generation: int | None = None) -> Manifest:
        if generation is not None:
            self.write(generation)
        return publish(self.writer.path, self.folder)[0]

    def follow(self, *, older: bool = False, any_model: bool = False) -> tuple[int, bool]:
        manifest, new = follow(self.path, self.folder, older=older, any_model=any_model)
        return manifest.generation, new

    def served(self) -> int:
        """The generation that the reader's gallery holds, whole and sound; 0 where there is none."""
        if not self.path.exists():
            return 0
        assert not verify(self.path).problems
        with closing(Gallery.open(self.path, policy=MANUAL)) as gallery:
            labels = [item.label for item in gallery.list(limit=1000)]
            (hits,) = gallery.search(AXES[:1], 1000)
        assert {*labels} == {hit.label for hit in hits}
        (label,) = {*labels}
        assert len(labels) == len(hits) == EACH * int(label)
        return int(label)

    def store(self, generation: int) -> Path:
        return self.folder / f"birds.generation-{generation}" / "gallery.sqlite"

    def index(self, generation: int) -> Path:
        return next(self.store(generation).parent.glob("*.faiss"))

    def followed(self) -> int:
        """The generation that the reader's gallery has a note of; 0 where it has none."""
        note = read_note(self.path)
        return note.generation if note else 0

    def names(self) -> list[str]:
        return sorted(path.name for path in self.reader.iterdir())


@pytest.fixture
def pair(memory: Path) -> Iterator[Pair]:
    pair = Pair(memory)
    with closing(pair.writer):
        yield pair


def test_no_call_fails_while_a_served_gallery_follows(memory: Path, encoder: FakeEncoder) -> None:
    pair = Pair(memory, model_name="fake", fingerprint="a" * 64, dimension=encoder.spec.dimension)
    seen: list[str] = []
    done = threading.Event()
    pair.publish(1)
    pair.follow()

    def search(address: str) -> None:
        with connected(address) as stubs:
            while not done.is_set():
                (result,) = stubs.search("birds", image(b"all"), k=200).results
                (label,) = {hit.label for hit in result.hits}
                assert len(result.hits) == EACH * int(label)
                seen.append(label)

    def saw(before: int, label: str) -> bool:
        return label in seen[before:] or any(each.done() for each in searching)

    with (
        closing(pair.writer),
        serving(encoder, GalleryDirectory(pair.reader)) as server,
        connected(server.address) as stubs,
        ThreadPoolExecutor() as threads,
    ):
        searching = [threads.submit(search, server.address) for _ in range(3)]
        try:
            for generation in range(2, 7):
                pair.publish(generation)
                assert pair.follow()[1]
                before = len(seen)
                until(partial(saw, before, f"{generation}"))
                time.sleep(0.02)
        finally:
            done.set()
        for each in searching:
            each.result()
        assert {*seen} == {*"123456"}
        refusal_of(lambda: stubs.upsert("birds", item("k")), "FAILED_PRECONDITION", reason="READ_ONLY")
        assert pair.names() == ["birds", "birds.before-6"]


def test_writes_are_refused_where_the_next_snapshot_would_undo_them(pair: Pair) -> None:
    pair.publish(1)
    pair.follow()
    with closing(Gallery.open(pair.path, policy=MANUAL)) as gallery:
        for write in (
            lambda: gallery.upsert([GalleryItem("mine", AXES[0])]),
            lambda: gallery.delete(["k0"]),
            lambda: gallery.update([ItemChange("k0", label="mine")]),
            lambda: gallery.touch({}),
        ):
            with pytest.raises(
                errors.ReadOnly, match=r"birds follows .* that .* publishes.*write to that one"
            ):
                write()
        gallery.rebuild()  # which loses nothing
        assert gallery.info().follows is not None
        (pair.path / NOTE_NAME).unlink()  # it is on its own from now on
        gallery.upsert([GalleryItem("mine", AXES[0])])
    pair.publish(2)
    with pytest.raises(errors.AlreadyExists, match=r"follows nobody.*would replace it; give it another name"):
        pair.follow()
    assert not pair.writer.find(["mine"])


def test_what_has_not_changed_is_neither_published_nor_fetched(pair: Pair) -> None:
    def looked(folder: Path) -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}

    first = pair.publish(1)
    assert pair.follow() == (1, True)
    shared, gallery = looked(pair.folder), looked(pair.path)
    second, new = publish(pair.writer.path, pair.folder)
    assert not new
    assert second.model_copy(update={"time": first.time}) == first
    assert second.time > first.time
    assert pair.follow() == (1, False)
    note = read_note(pair.path)
    assert note
    assert note.time == second.time.isoformat()
    assert {name for name, it in looked(pair.folder).items() if shared[name] != it} == {"birds.json"}
    assert {name for name, it in looked(pair.path).items() if gallery[name] != it} == {NOTE_NAME}
    pair.writer.delete(["k0"])
    assert pair.publish().generation == 2
    pair.writer.rebuild()  # of the same items
    assert pair.publish().generation == 3
    os.truncate(pair.folder / "birds.generation-3" / "gallery.sqlite", 5000)
    assert pair.publish().generation == 4  # as nobody could fetch it


def test_the_folder_keeps_two_snapshots_and_no_halves(pair: Pair) -> None:
    for generation in (1, 2, 3):
        pair.publish(generation)
    for half in ("birds.generation-4", "birds.generation-5"):  # of a writer that was killed
        shutil.copytree(pair.folder / "birds.generation-2", pair.folder / half)
    (pair.folder / "birds.json.0123abcd.tmp").write_bytes(b"half")
    (pair.folder / "birds-2.generation-1").mkdir()  # of another gallery
    assert pair.publish(4).generation == 4
    assert sorted(path.name for path in pair.folder.iterdir()) == [
        "birds-2.generation-1", "birds.generation-3", "birds.generation-4", "birds.json",
    ]  # fmt: skip
    assert [path.name for path in pair.writer.path.parent.iterdir()] == ["birds"]
    (pair.folder / "birds.json").unlink()
    assert pair.publish().generation == 5
    with pytest.raises(
        errors.NotFound, match=r"there is no folder .*gone to publish in; make it, or mount it"
    ):
        publish(pair.writer.path, pair.folder / "gone")
    with (
        claimed(pair.writer.path, "publish"),
        pytest.raises(errors.Overloaded, match="another crossbatch gallery publish birds"),
    ):
        pair.publish(7)


def change(**fields: Any) -> Callable[[Pair], None]:
    def harm(pair: Pair) -> None:
        path = pair.folder / "birds.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return harm


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "kind", "words"),
    [
        (lambda it: os.truncate(it.store(2), 5000), errors.BadArtifact, "not what was .* 5,000 bytes of"),
        (lambda it: os.truncate(it.store(2), 1 << 20), errors.BadArtifact, "bytes of SHA.*expected"),
        (lambda it: flip(it.store(2), 9000), errors.BadArtifact, "not what was published, or not all of it"),
        (lambda it: flip(it.index(2), 99), errors.BadArtifact, r"/index-\S+\.faiss is not what was"),
        (lambda it: it.store(2).unlink(), errors.Unavailable, "it has not come yet, is gone"),
        (lambda it: shutil.rmtree(it.store(2).parent), errors.Unavailable, "it has not come yet, is gone"),
        (change(files={}), errors.NotFound, "there is no gallery file"),
        (change(files={"../../x": (1, "0")}), errors.BadArtifact, "files.*pattern"),
        (change(format=2), errors.BadArtifact, "this crossbatch reads .format: Input should be 1.; upgrade"),
        (change(name="bees"), errors.BadArtifact, "is of the gallery bees; look at what publishes there"),
        (change(generation="x"), errors.BadArtifact, r"no manifest .*\(generation: Input should"),
        (lambda it: os.truncate(it.folder / "birds.json", 40), errors.BadArtifact, "no manifest"),
        (lambda it: (it.folder / "birds.json").unlink(), errors.Unavailable, "the manifest .* mounted here"),
        (lambda it: it.folder.rename(it.folder.with_name("away")), errors.Unavailable, "the manifest"),
        (lambda it: pipe(it.store(2)), errors.Unavailable, "it has not come yet, is gone"),
        (lambda it: pipe(it.folder / "birds.json"), errors.BadArtifact, "birds.json is no file"),
        (change(generation=1, id="0"), errors.Mismatch, "generation 1 is served here.*by --older"),
        (change(fingerprint="e" * 64), errors.ModelMismatch, r"model m \(fingerprint e+\).*--any-model"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_told_and_tried_again(
    pair: Pair, harm: Callable[[Pair], None], kind: type[Exception], words: str
) -> None:
    pair.publish(1)
    pair.follow()
    pair.publish(2)
    whole = shutil.copytree(pair.folder, pair.folder.with_name("whole"))
    harm(pair)
    for _ in range(2):
        with pytest.raises(kind, match=words) as caught:
            pair.follow()
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
        assert pair.served() == 1
        assert pair.names() == ["birds"]
    shutil.rmtree(pair.folder, ignore_errors=True)
    whole.rename(pair.folder)
    assert pair.follow()[1]
    assert pair.served() == 2


def test_a_generation_of_another_model_or_an_older_one_is_taken_where_asked_for(
    pair: Pair, memory: Path
) -> None:
    for generation in (1, 2, 3):
        pair.publish(generation)
    pair.follow()
    (memory / "new").mkdir()
    other = Pair(memory / "new", model_name="other", fingerprint="e" * 64)
    with closing(other.writer):
        other.publish(4)
        other.path = pair.path
        with pytest.raises(errors.Mismatch, match=r"generation 1 .* generation 3 is served here"):
            other.follow()
        with pytest.raises(errors.ModelMismatch, match=r"other.*eeeeee.*ffffff.*load the new model"):
            other.follow(older=True)
        assert other.follow(older=True, any_model=True) == (1, True)
        assert other.served() == 4
        assert GalleryDirectory(pair.reader).rollback("birds") == "birds.before-1"
        assert pair.served() == 3


def test_rollback_lasts_until_the_next_generation(pair: Pair) -> None:
    for generation in (1, 2, 3):
        pair.publish(generation)
        pair.follow()
    assert pair.names() == ["birds", "birds.before-3"]
    with GalleryDirectory(pair.reader, policy=MANUAL) as directory:
        directory.rollback("birds")
        assert pair.served() == 2
        with pytest.raises(errors.Mismatch, match=r"generation 3 .* was rolled back here.*--older"):
            pair.follow()
        assert pair.served() == 2
        assert pair.follow(older=True) == (3, True)
        directory.rollback("birds")
        pair.publish(4)
        assert pair.follow() == (4, True)
        assert pair.names() == ["birds", "birds.before-4"]
        directory.rollback("birds")
        assert pair.served() == 2


def test_a_reader_publishes_nothing_nor_does_a_writer_among_its_galleries(pair: Pair) -> None:
    pair.publish(1)
    pair.follow()
    with pytest.raises(errors.ReadOnly, match="write to that one"):
        publish(pair.path, pair.folder)
    with pytest.raises(errors.InvalidArgument, match="publish in a folder of its own"):
        publish(pair.writer.path, pair.writer.path.parent)
    assert Manifest.read(pair.folder, "birds").generation == 1


def test_a_gallery_of_another_model_than_its_manifest_says_is_left(pair: Pair) -> None:
    pair.publish(1)
    change(fingerprint="e" * 64)(pair)
    with pytest.raises(errors.BadArtifact, match="is of the model m, and the manifest"):
        pair.follow()
    assert pair.names() == []


def test_a_damaged_note_of_an_old_generation_stops_nothing(pair: Pair) -> None:
    for generation in (1, 2):
        pair.publish(generation)
        pair.follow()
    (pair.reader / "birds.before-2" / NOTE_NAME).write_text("{")
    pair.publish(3)
    pair.follow()
    assert pair.names() == ["birds", "birds.before-3"]


def test_a_followed_gallery_whose_name_begins_alike_stays(pair: Pair) -> None:
    pair.publish(1)
    pair.follow()
    other = shutil.copytree(pair.path, pair.reader / "birds.before-easter-1")
    for generation in (2, 3):
        pair.publish(generation)
        pair.follow()
    assert pair.names() == ["birds", "birds.before-3", other.name]


def test_what_the_writer_switches_or_rolls_back_comes_to_its_readers(pair: Pair) -> None:
    pair.publish(1)
    with GalleryDirectory(pair.writer.path.parent, policy=MANUAL) as directory:
        directory.create("next", **MODEL).upsert(
            [GalleryItem(f"k{n}", AXES[0], "2") for n in range(2 * EACH)]
        )
        directory.switch("birds", "next")
        pair.publish()
        assert pair.follow() == (2, True)
        assert pair.served() == 2
        directory.rollback("birds")
        pair.publish()
        assert pair.follow() == (3, True)
        assert pair.served() == 1
        directory.drop("birds")
        with pytest.raises(errors.NotFound, match="there is no gallery file"):
            pair.publish()
    assert pair.follow() == (3, False)
    with closing(Gallery.open(pair.reader / "birds.before-3", policy=MANUAL)) as gallery:
        assert gallery.info().previous_name == ""  # though the writer's has one


def test_one_gallery_has_one_follower(pair: Pair) -> None:
    pair.publish(1)
    with GalleryDirectory(pair.reader) as directory, claimed(directory.path / "birds", "follow"):
        given = {"name": "birds", "other": str(pair.folder), "galleries": pair.reader, "once": True}
        with pytest.raises(errors.Overloaded, match="another crossbatch gallery follow birds is running in"):
            run(Settings.model_validate({"action": "follow", **given}))
    assert render(run(Settings.model_validate({"action": "follow", **given}))) == (
        "generation 1 of the gallery birds (20 items) is now served"
    )


def test_nothing_stays_of_what_a_full_disk_did_not_take(pair: Pair, small_disk: Path) -> None:
    pair.folder, ballast = small_disk, small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    os.truncate(ballast, ballast.stat().st_size - 8192)
    with pytest.raises(errors.Overloaded, match="full"):
        pair.publish(1)
    assert {path.name for path in small_disk.iterdir()} == {"ballast"}
    ballast.unlink()
    assert pair.publish(1).generation == 1


def test_a_full_disk_is_told_and_the_generation_before_stays(pair: Pair, small_disk: Path) -> None:
    pair.path, ballast = small_disk / "birds", small_disk / "ballast"
    pair.publish(1)
    pair.follow()
    size = pair.publish(2).files["gallery.sqlite"].bytes
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    for room in (0, size // 2, size + size // 2):  # for nothing, half of the snapshot, it and half a gallery
        os.truncate(ballast, ballast.stat().st_size - room)
        with pytest.raises(errors.Overloaded, match=r"full.*; free some space"):
            pair.follow()
        assert {path.name for path in small_disk.iterdir()} - {"birds.before-2"} == {"ballast", "birds"}
    ballast.unlink()
    assert pair.served() == 1
    assert pair.follow()[1]
    assert pair.served() == 2


def test_lag_grows_until_the_follower_looks_again(
    memory: Path, encoder: FakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.observability.metrics.REFRESH_SECONDS", 0.02)
    pair = Pair(memory, model_name="fake", fingerprint="a" * 64, dimension=FakeSpec().dimension)
    pair.publish(1)
    pair.follow()
    name = 'crossbatch_gallery_lag_seconds{gallery="birds"}'
    with closing(pair.writer), serving(encoder, GalleryDirectory(pair.reader), metrics_port=0) as server:
        lag = until(lambda: told(server, name) > 0 and told(server, name))
        assert lag < 60
        until(lambda: told(server, name) > lag)
        note = read_note(pair.path)
        assert note
        write_note(pair.path, replace(note, time="2026-01-01T00:00:00+00:00"))
        until(lambda: told(server, name) > 3600)
        pair.publish(2)
        until(lambda: told(server, name) > 3600)  # the new one is not served yet
        pair.follow()
        until(lambda: told(server, name) < 60)
        info = run(Settings.model_validate({"action": "info", "name": "birds", "galleries": pair.reader}))
        assert re.search(rf"follows +{pair.folder}, generation 2 of \d s ago\n", render(info))


# One process that has all loaded forks a follower for each line it reads, which kills itself before the n-th
# thing that it does to files. What it has done is the answer where it came to its end.
NURSERY = """
import os, signal, sys
os.environ["OMP_NUM_THREADS"] = "1"
from pathlib import Path
from serving.gallery.follow import follow
from serving.gallery.index.index import load_faiss

load_faiss()
done = 0

def look(event, _):
    global done
    if event.startswith(("open", "os.", "shutil.", "fcntl.", "ctypes.", "sqlite3.connect")):
        done += 1
        if done == most:
            os.kill(os.getpid(), signal.SIGKILL)

for line in sys.stdin:
    if os.fork() == 0:
        most = int(line)
        sys.addaudithook(look)
        follow(Path(sys.argv[1]), Path(sys.argv[2]))
        os.write(1, f"{done}\\n".encode())
        os._exit(0)
    if os.wait()[1] != 0:
        os.write(1, b"killed\\n")
"""


def test_a_killed_follower_leaves_the_old_or_the_new(pair: Pair) -> None:
    words = [sys.executable, "-c", NURSERY, str(pair.path), str(pair.folder)]
    chance, found = random.Random(0), set[int]()
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as nursery:
        assert nursery.stdin
        assert nursery.stdout

        def run_until(event: int) -> str:
            assert nursery.stdin
            assert nursery.stdout
            nursery.stdin.write(f"{event}\n")
            nursery.stdin.flush()
            return nursery.stdout.readline().strip()

        pair.publish(1)
        assert run_until(0).isdecimal()
        pair.publish(2)
        total = int(run_until(0))
        for generation in range(3, 3 + KILLS):
            pair.publish(generation)
            at = total - (generation - 3) if generation < 10 else chance.randint(1, total)  # the end, closely
            answer = run_until(at)
            assert (
                answer == "killed" or answer.isdecimal()
            )  # the number of things done is not always the same
            found.add(pair.served() - generation)
            assert found <= {-1, 0}
            pair.follow()
            assert pair.served() == generation
            assert pair.names() == ["birds", f"birds.before-{generation}"]
        nursery.stdin.close()
    assert found == {-1, 0}


def test_both_go_on_by_themselves(pair: Pair) -> None:
    pair.write(1)
    words = [sys.executable, "-m", "crossbatch", "gallery"]
    both = ["birds", str(pair.folder), "--every", "0.05", "--galleries"]
    lines = list[dict[str, Any]]()
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with (
        subprocess.Popen([*words, "follow", *both, str(pair.reader)], **pipes) as follower,
        subprocess.Popen([*words, "publish", *both, str(pair.writer.path.parent)], **pipes) as writer,
    ):
        try:
            until(lambda: pair.followed() == 1, 30)
            pair.write(2)
            until(lambda: pair.followed() == 2)
            pair.folder.rename(pair.folder.with_name("away"))
            time.sleep(0.3)
            pair.folder.with_name("away").rename(pair.folder)
            pair.write(3)
            until(lambda: pair.followed() == 3)
            assert pair.served() == 3
        finally:
            for process in (follower, writer):
                process.send_signal(signal.SIGTERM)
        for process in (follower, writer):
            _, said = process.communicate(timeout=20)
            assert process.returncode == 130
            assert said.endswith("interrupted\n")
            lines += [json.loads(line) for line in said.splitlines()[:-1]]
    told = [f"{line['level']} {line['message']}" for line in lines]
    for words_told in (
        "INFO generation 2 of the gallery birds (40 items) is now published",
        "INFO generation 2 of the gallery birds (40 items) is now served",
        "WARNING the manifest",
        "WARNING there is no folder",
    ):
        assert any(line.startswith(words_told) for line in told), told
    assert len(told) < 40
