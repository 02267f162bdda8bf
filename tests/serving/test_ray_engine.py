"""The Ray engine fills a gallery as the plain one does, to the byte, whatever is killed on the way."""

import json
import logging
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.catalog.picture import File
from serving.errors import BadImage, BadSetting, Unavailable
from serving.indexing import ray_engine
from serving.indexing.pipeline import Found
from serving.indexing.shards import Entry, finished, name_of, read_shard, write_shard
from serving.model.spec import read_model
from tests.pictures import encoded
from tests.serving.indexed import counts, index, opened
from tests.test_docs import ROOT, commands
from tests.tiny_model import tiny_graph, write_tiny_model

pytestmark = [
    pytest.mark.timeout(150),  # Ray takes 5 to 10 s to start its processes, once a run
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning",  # Ray leaves files and sockets to the collector
        "ignore:`use_:DeprecationWarning",  # it warns of settings of its own when it copies them
    ),
]
COUNT, BATCH = 60, 3


@pytest.fixture(scope="module", autouse=True)
def records() -> Iterator[None]:
    """Let log records be as they were, to which Ray adds a time of its own from its import on."""
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of one machine with two cores, as far as Ray knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray_engine._import_ray()
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "include_dashboard": False}
        cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        yield cluster.address
        cluster.shutdown()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Pictures that take a while to decode, of four classes, and two files that are none."""
    root, random = tmp_path / "data", np.random.default_rng(0)
    for number in range(COUNT):
        folder = root / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = random.integers(0, 256, (400, 300, 3), np.uint8)
        (folder / f"{number:02}.jpg").write_bytes(encoded(noise, "JPEG"))
    (root / "class1/bad.jpg").write_bytes(b"this is a text")
    (root / "class3/empty.jpg").write_bytes(b"")
    return root


def by_ray(
    model: Path, data: Path, gallery: Path, address: str, *words: str, cwd: Path = ROOT
) -> dict[str, Any]:
    """Run the command in a process of its own, as users do."""
    given = f"--ray-address {address} --shard-images {BATCH} --batch {BATCH} --threads 2 --encoders 2 --json"
    fixed = ["index", "--engine", "ray", "--model", model, "--data", data, gallery, *given.split(), *words]
    line = [sys.executable, "-m", "crossbatch", *map(str, fixed)]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(done.stderr)
    return dict(json.loads(done.stdout))


def contents(path: Path) -> list[object]:
    """All that a gallery holds, vectors as bytes."""
    with opened(path) as gallery:
        keys = [item.key for item in gallery.list(limit=1000)]
        items = gallery.find(keys, thumbnails=True)
    return [
        (key, it.vector.tobytes(), it.label, it.uri, dict(it.metadata), it.source, it.thumbnail, it.version)
        for key, it in items.items()
    ]


def notes(shards: Path) -> dict[str, int]:
    """The shards that are finished, and when each was written."""
    return {path.stem: path.with_suffix(".npz").stat().st_mtime_ns for path in shards.glob("*.json")}


def kill_workers(shards: Path, killed: list[str]) -> None:
    """Wait for the first shard, then kill a process of each kind that the cluster of this process runs."""
    while len(notes(shards)) < 2:
        time.sleep(0.005)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_text().partition("\0")[0].strip()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            above = Path("/proc", parent, "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        ours = int(above) == os.getpid() and ("_Encode" in title or "_decode" in title)
        if ours and title not in killed:
            os.kill(int(folder.name), signal.SIGKILL)
            killed.append(title)


def test_it_does_what_the_plain_engine_does_though_workers_are_killed(
    tmp_path: Path, model: Path, data: Path, address: str
) -> None:
    late = [data / f"class{number % 4}/{number:02}.jpg" for number in range(3, COUNT)]
    for path in late:
        path.rename(tmp_path / path.name)
    for name in ("plain", "ray"):
        index(model, data, tmp_path / name, thumbnails=True)
    for path in late:
        (tmp_path / path.name).rename(path)
    (data / "class0/00.jpg").write_bytes(late[0].read_bytes())
    (data / "class1/01.jpg").touch()
    (data / "class2/02.jpg").unlink()
    killed = list[str]()
    killer = threading.Thread(target=kill_workers, args=(tmp_path / ".ray.shards", killed), daemon=True)
    killer.start()
    result = by_ray(model, data, tmp_path / "ray", address, "--sync")
    plain = index(model, data, tmp_path / "plain", sync=True)
    assert any("_Encode" in title for title in killed)
    assert contents(tmp_path / "ray") == contents(tmp_path / "plain")
    assert counts(result) == counts(plain) == {"stored": 58, "unchanged": 1, "deleted": 1, "skipped": 2}
    assert result["skipped"] == plain["skipped"]
    assert not (tmp_path / ".ray.shards").exists()
    assert counts(by_ray(model, data, tmp_path / "ray", "local")) == {"unchanged": 59, "skipped": 2}


def test_a_killed_run_is_gone_on_with_and_a_damaged_shard_made_again(
    tmp_path: Path, model: Path, data: Path, address: str
) -> None:
    (tmp_path / "photos").symlink_to(data)
    index(model, tmp_path / "photos", tmp_path / "plain")
    shards, gallery = tmp_path / "shards", tmp_path / "galleries/birds"
    (told,) = (each for each in commands(ROOT / "docs/catalogues.md") if "--engine ray" in each)
    words = f"{told} --ray-address local --batch {BATCH} --threads 2 --shard-images {BATCH} --shards {shards}"
    line = [sys.executable, "-m", *shlex.split(words)]
    with subprocess.Popen(line, cwd=tmp_path) as command:
        while len(notes(shards)) < 3:
            assert command.poll() is None
            time.sleep(0.005)
        command.kill()  # and all of Ray ends with it
    time.sleep(1)
    before = notes(shards)
    assert 3 <= len(before) < (COUNT + 2) // BATCH
    damaged = min(before)
    with (shards / f"{damaged}.npz").open("r+b") as file:
        file.seek(-30, os.SEEK_END)
        file.write(b"x")
    result = by_ray(model, tmp_path / "photos", gallery, address, "--shards", str(shards))
    assert counts(result) == {"stored": COUNT, "skipped": 2}
    after = notes(shards)
    assert len(after) == -(-(COUNT + 2) // BATCH)
    assert {name for name in before if after[name] != before[name]} == {damaged}
    assert contents(gallery) == contents(tmp_path / "plain")


def test_files_that_only_this_machine_has_are_told(
    tmp_path: Path, model: Path, data: Path, address: str
) -> None:
    for path in data.glob("class[1-3]/*.jpg"):
        path.unlink()
    here = Path("/proc/self/cwd/data")  # which is another folder for each process
    with pytest.raises(
        Unavailable, match=r"cwd/data/.* cannot be read there \(No such file .* here it can; "
    ):
        by_ray(model, here, tmp_path / "birds", address, cwd=tmp_path)
    assert not (tmp_path / "birds").exists()


def test_a_machine_without_the_model_or_the_folder_says_so(tmp_path: Path, model: Path) -> None:
    spec, found = read_model(model)[1], pickle.dumps({"a": Found(1, 2, b"d" * 32)})
    other = write_tiny_model(tmp_path / "other.onnx", tiny_graph(histograms=False))
    row = {"name": name_of("a"), "found": found, "changed": pickle.dumps({}), "unread": "", "why": ""}
    for file, folder, told in (
        (model, tmp_path, "^$"),
        (tmp_path / "absent", tmp_path, "absent is not there.*at the same path"),
        (other, tmp_path, f"the fingerprint .* there, and {spec.fingerprint[:12]} here; .*same"),
        (model, tmp_path / "absent", "the folder .*absent cannot be written"),
    ):
        given: dict[str, Any] = {"provider": "cpu", "threads": 1, "batch": 1, "shards": folder}
        made = ray_engine._Encode(spec=spec, model=file, **given)(row)
        assert re.search(told, made["fault"])
    assert finished(tmp_path, spec.fingerprint, ["a"]) == {"a": name_of("a")}


def test_nobody_waits_for_ever(
    tmp_path: Path, model: Path, data: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = data / "class0/00.jpg"
    for path in {*data.rglob("*.jpg")} - {image}:
        path.unlink()

    def make_folder(path: Path) -> None:
        path.mkdir()
        image.unlink()
        os.mkfifo(image)  # nobody writes into it, and it is read for ever

    monkeypatch.setattr(ray_engine, "make_folder", make_folder)
    with pytest.raises(Unavailable, match=r"finished no shard for 4 seconds: .* the same command goes on"):
        index(model, data, tmp_path / "birds", engine="ray", ray_address=address, patience=4)


def test_only_whole_shards_of_the_model_count(tmp_path: Path) -> None:
    vector = np.array([1, 0, 0], np.float32)
    entries: dict[str, Entry] = {
        "a": (Found(1, 2, b"d" * 32, picture=b"jpeg"), vector),
        "b": BadImage("no image"),
        "c": OSError("a bad sector"),
        "d": (Found(3, 4, b"e" * 32), None),
    }
    write_shard(tmp_path, entries, "model")
    write_shard(tmp_path, {"e": entries["a"]}, "another model")
    name = name_of(entries)
    read = read_shard(tmp_path, name)
    assert [repr(each) for each in read.values()] == [repr(each) for each in entries.values()]
    assert list(read) == list(entries)
    (tmp_path / "stranger.json").write_text("{}")
    wanted = ["a", "b", "c", "d", "e"]
    assert finished(tmp_path, "model", wanted) == dict.fromkeys("abd", name)
    assert finished(tmp_path, "model", ["b"]) == {"b": name}
    write_shard(tmp_path, entries, "model", changed={"a"})  # which is of other bytes than its id tells
    assert finished(tmp_path, "model", wanted) == dict.fromkeys("bd", name)
    file = tmp_path / f"{name}.npz"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100] + b"x" + whole[101:]):
        file.write_bytes(damaged)
        assert finished(tmp_path, "model", wanted) == {}
    file.unlink()
    assert finished(tmp_path, "model", wanted) == {}


def test_a_file_that_is_another_by_now_is_read_and_told_of(model: Path, data: Path) -> None:
    paths = sorted(data.rglob("*.jpg"))[:3]
    pictures = [File(path) for path in paths]
    stamps = [each.stamp() for each in pictures]
    paths[0].write_bytes(b"no picture")
    paths[1].write_bytes(paths[2].read_bytes() + b" ")
    shard = [
        ray_engine._Wanted(f"{n}", it, stamp, b"", None)
        for n, (it, stamp) in enumerate(zip(pictures, stamps, strict=True))
    ]
    made = ray_engine._decode({"name": "shard", "images": pickle.dumps(shard)}, read_model(model)[1])
    assert pickle.loads(made["changed"]) == {"0", "1"}
    assert pickle.loads(made["found"])["1"].digest == sha256(paths[1].read_bytes()).digest()


def test_a_run_removes_its_own_shards_and_tells_of_one_that_is_damaged(tmp_path: Path, model: Path) -> None:
    given: dict[str, Any] = dict.fromkeys(("decoders", "encoders", "shard_images", "patience"), 1)
    given |= {"model": model, "spec": read_model(model)[1], "provider": "cpu", "ray_address": "local"}
    engine = ray_engine.RayEngine(shards=tmp_path / "shards", **given)
    engine.shards.mkdir()
    for id in "ab":
        write_shard(engine.shards, {id: BadImage("none")}, "model")
    engine.used.add(name_of("a"))
    assert list(engine._read(name_of("a"))) == ["a"]
    engine.forget()
    assert finished(engine.shards, "model", "ab") == {"b": name_of("b")}
    (engine.shards / f"{name_of('b')}.npz").write_bytes(b"cut off")
    for name in map(name_of, "ab"):
        with pytest.raises(Unavailable, match=r"was damaged or removed while .*; the same command makes it"):
            engine._read(name)
    engine.used.add(name_of("b"))
    engine.forget()
    assert not engine.shards.exists()
    engine.shards.write_text("")
    with pytest.raises(BadSetting, match="shards is no folder"):
        replace(engine)


def test_what_ray_raises_is_told_in_a_sentence() -> None:
    from ray import exceptions

    ray: Any = exceptions
    task = ray.RayTaskError("map", "much text", ray.OutOfMemoryError("memory")).as_instanceof_cause()
    assert "run out of memory" in ray_engine._told(task)
    assert "was killed, or its machine lost" in ray_engine._told(ray.ActorDiedError())
    assert ray_engine._told(ValueError("odd\nlines")) == "Ray has failed: odd"


def test_settings_of_ray_are_for_ray_which_must_be_there(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadSetting, match="--shard-images is for --engine ray"):
        index(model, data, tmp_path / "birds", shard_images=8)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadSetting, match=r"crossbatch\[cluster\]"):
        index(model, data, tmp_path / "birds", engine="ray")
