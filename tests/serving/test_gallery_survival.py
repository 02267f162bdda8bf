"""What galleries keep when whoever writes is killed, at 200 random moments, and when their disk is full."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from serving.errors import Overloaded
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.verify import verify
from tests.serving.vectors import MANUAL, MODEL, created, sql, units

DIMENSION = 16
GROUPS, EACH = 8, 10
KILLS = 200
MOST_LINES = 8  # that a writer says before it is killed: two a call
MOST_SECONDS = 0.01  # that pass from then on
NAMES = ("new", "old")

# One process that has everything loaded forks a writer whenever it reads a line, and says its number: a start
# takes milliseconds, so that 200 are killed in half a minute. A writer says what it is about to do, and what
# has been acknowledged, in whole lines. A call writes a whole group of items, so that a half would show.
NURSERY = """
import json, os, sys, threading
os.environ["OMP_NUM_THREADS"] = "1"
import numpy as np
from pathlib import Path
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import GalleryItem, RebuildPolicy
from serving.gallery.index.index import load_faiss
from serving.gallery.item import Source

def say(*what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def write(folder, step, seed):
    directory = GalleryDirectory(folder, policy=RebuildPolicy(least=40, share=0.0))
    rng = np.random.default_rng(seed)
    while True:
        step += 1
        name = ("new", "old")[int(rng.integers(2))]
        group = int(rng.integers(8))
        keys = [f"{group}/{i}" for i in range(10)]
        kind = rng.choice(["upsert", "upsert", "upsert", "delete", "rebuild", "build", "switch"])
        say("begin", kind, name, group, step)
        if kind == "upsert":
            kin = np.random.default_rng(group) if step % 2 else rng  # of the vectors that are there, perhaps
            rows = kin.standard_normal((10, 16)).astype(np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            step_of = {"step": step}
            source = None if step % 3 else Source("shop", 1, step, bytes(32))
            items = [GalleryItem(key, row, str(step), "", step_of, source) for key, row in zip(keys, rows)]
            directory.using(name, lambda gallery: gallery.upsert(items))
        elif kind == "delete":
            directory.using(name, lambda gallery: gallery.delete(keys))
        elif kind == "rebuild":
            directory.using(name, lambda gallery: gallery.rebuild())
        elif kind == "build":
            directory.using(name, lambda gallery: gallery.rebuild(index=("exact", "HNSW8,Flat")[step % 2]))
        else:
            try:
                directory.switch("new", "old")
            except Exception as error:  # a second switch of the same two is undone by a rollback
                if "rollback" not in str(error):
                    raise
                directory.rollback("new")
        say("done", kind, name, group, step)

folder = Path(sys.argv[1])
load_faiss()
assert threading.active_count() == 1
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        say("child", os.getpid())
        try:
            write(folder, *map(int, line.split()))
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    say("gone", child)
"""


def run_and_kill(process: subprocess.Popen[str], step: int, chance: random.Random) -> list[list[Any]]:
    """Have a writer forked, kill it within or after one of its first calls, and return all that it said."""
    assert process.stdin is not None
    process.stdin.write(f"{step} {chance.randrange(1 << 30)}\n")
    process.stdin.flush()
    lines = [said(process.stdout) for _ in range(1 + chance.randrange(MOST_LINES))]
    time.sleep(chance.uniform(0.0, MOST_SECONDS))
    child = lines[0][1]
    os.kill(child, signal.SIGKILL)
    while lines[-1] != ["gone", child]:
        lines.append(said(process.stdout))
    return [line for line in lines if line[0] in ("begin", "done")]


def said(stream: IO[str] | None) -> list[Any]:
    assert stream is not None
    line = stream.readline()
    assert line, "the nursery has ended"
    return list(json.loads(line))


Contents = dict[str, dict[int, int]]
"""For each gallery name the step that wrote each group that is there."""


def contents(directory: GalleryDirectory) -> Contents:
    """Read every group of every gallery; a half of one fails, and so does any damage."""
    found: Contents = {}
    for name in directory.names():
        gallery = directory.get(name)
        groups: dict[int, set[str]] = {}
        items = gallery.list(limit=1_000)
        for item in items:
            groups.setdefault(int(item.key.split("/")[0]), set()).add(item.label)
        assert len(items) == EACH * len(groups)
        assert all(len(labels) == 1 for labels in groups.values())
        found[name] = {group: int(labels.pop()) for group, labels in groups.items()}
        (hits,) = gallery.search(np.eye(1, DIMENSION, dtype=np.float32), 2 * EACH * GROUPS)
        assert {(hit.key, hit.label) for hit in hits} == {(item.key, item.label) for item in items}
        assert verify(directory.path / name).problems == []
    return found


def after(state: Contents, kind: str, name: str, group: int, step: int) -> Contents:
    changed = {each: dict(groups) for each, groups in state.items()}
    if kind == "upsert":
        changed[name][group] = step
    elif kind == "delete":
        changed[name].pop(group, None)
    elif kind == "switch":
        changed["new"], changed["old"] = changed["old"], changed["new"]
    return changed


@pytest.mark.timeout(240)
def test_killed_writer_loses_nothing_acknowledged(memory: Path) -> None:
    for name in NAMES:
        created(memory / name, DIMENSION).close()
        sql(memory / name, "ALTER TABLE items DROP COLUMN given")  # as version 0.1 made them
    expected: Contents = {name: {} for name in NAMES}
    chance, step = random.Random(0), 0
    done = dict.fromkeys(("upsert", "delete", "rebuild", "build", "switch"), 0)
    cut = dict.fromkeys(done, 0)
    words = [sys.executable, "-c", NURSERY, str(memory)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(KILLS):
            pending: tuple[str, str, int, int] | None = None
            for event, kind, name, group, number in run_and_kill(process, step, chance):
                step = number
                pending = (kind, name, group, step) if event == "begin" else None
                if event == "done":
                    expected = after(expected, kind, name, group, step)
                    done[kind] += 1
            with closing(GalleryDirectory(memory, policy=MANUAL)) as directory:
                found = contents(directory)
            if pending is not None:
                cut[pending[0]] += 1
                if found == after(expected, *pending):
                    expected = found  # it was done, and killed before it could say so
            assert found == expected
    assert min(done.values()) > 5, done  # it did get to work
    assert sum(cut.values()) > KILLS / 2, cut
    with closing(GalleryDirectory(memory)) as directory:
        for name in NAMES:
            directory.using(name, lambda gallery: gallery.rebuild())
    for name in NAMES:  # what the dead left behind is gone
        assert len({path.stem for path in (memory / name).glob("index-*")}) <= 1
    assert sorted(path.name for path in memory.iterdir()) == sorted(NAMES)


def test_full_disk_loses_nothing_acknowledged(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (2 << 20))
    rows = units(10, 32)
    made_for = {**MODEL, "dimension": 32}
    acknowledged: list[str] = []

    def fill(gallery: Gallery) -> None:
        for step in range(10_000):
            keys = [f"{step}/{i}" for i in range(10)]
            gallery.upsert([GalleryItem(key, row, "x" * 1000) for key, row in zip(keys, rows, strict=True)])
            acknowledged.extend(keys)

    with GalleryDirectory(small_disk, policy=MANUAL) as directory:
        gallery = directory.create("a", **made_for)
        with pytest.raises(Overloaded, match="full") as caught:
            fill(gallery)
        assert "\n" not in str(caught.value)
        assert caught.value.retry_after >= 1
        with suppress(OSError), filler.open("ab", buffering=0) as file:  # to the last byte
            while True:
                file.write(b"x" * 4096)
        for work in (gallery.rebuild, partial(directory.create, "b", **made_for)):
            with pytest.raises(Overloaded, match="full"):
                work()
        assert directory.names() == ["a"]
        assert len(acknowledged) > 100
        assert {hit.key for hit in gallery.search(rows[:1], 2048)[0]} == set(acknowledged)  # searches go on
    filler.unlink()
    with GalleryDirectory(small_disk) as directory:
        assert [item.key for item in directory.get("a").get(acknowledged)] == acknowledged
        assert directory.get("a").info().items == len(acknowledged)
        directory.get("a").delete(acknowledged[:50])
