"""The serve command as a process: start, drained stop, and `kill -9` in the middle of writing."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image

from serving.client import Client, Item
from serving.errors import CrossbatchError
from serving.gallery.directory import GalleryDirectory
from serving.model.encoder import Encoder
from tests.serving.authority import Authority
from tests.serving.processes import ROOT, Launched, command, launched
from tests.tiny_model import DIMENSION, write_tiny_model

KILLS = 20

# Forks a server for each line on standard input. The engines are imported once, and nothing else is done
# before the fork, which saves a second a start; each server is a process of its own, to be killed.
NURSERY = """
import json, os, sys
import faiss, grpc, onnxruntime, serving.model.encoder, serving.gallery.directory
from serving.server import command
for line in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stdin.close()
        sys.stdout = os.fdopen(write, "w")
        command.run(command.Settings.model_validate_json(line))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        print(json.dumps([child, said.readline()]), flush=True)
"""


def picture_of(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def unit(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    vector = np.random.default_rng(seed).normal(size=DIMENSION)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny.onnx")
    return tmp_path / "tiny.onnx"


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator[Launched]:
    with launched(model, tmp_path / "g") as started:
        yield started


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_log_holds_our_lines_alone_whoever_knocks(
    model: Path, tmp_path: Path, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    certificate, key = Authority().sign().write(tmp_path)
    words = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--workers", workers]
    with launched(model, tmp_path / "g", *words) as started:
        host, _, port = started.address.rpartition(":")
        for _ in range(8):
            with socket.create_connection((host, int(port)), timeout=5) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                plain.recv(100)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(10) == 0
        assert started.said("stopped")  # each line is JSON


def test_the_real_parts_from_photo_to_answer_then_a_drained_stop(started: Launched, model: Path) -> None:
    process = started.process
    with Client(started.address) as client:
        assert client.ready()
        assert client.model().name == "tiny"
        client.create("birds")
        pictures = [picture_of(seed) for seed in range(10)]
        items = [Item(f"{i}", image=picture, label=f"l{i}") for i, picture in enumerate(pictures)]
        assert len(client.upsert("birds", items)) == 10
        encoder = Encoder(model)
        expected = encoder.encode(np.stack([encoder.preprocess(picture) for picture in pictures]))
        np.testing.assert_allclose(client.embed(pictures), expected, atol=1e-6)
        assert [hits[0].key for hits in client.search("birds", images=pictures)] == [
            f"{i}" for i in range(10)
        ]
        bad = client.embed([pictures[0], b"text", pictures[0][:40]], on_error="return")
        assert [isinstance(each, CrossbatchError) for each in bad] == [False, True, True]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=15)
    assert process.returncode == 0
    assert "served 127.0.0.1" in out
    assert started.said("serving on")
    assert all(each["request_id"] for each in started.said("", rpc="RetrievalService/Embed"))
    assert started.said("draining")


def test_with_json_what_follows_the_first_line_is_json(model: Path, tmp_path: Path) -> None:
    line = command(model, tmp_path / "g", "--json")
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=15)
        finally:
            process.kill()
    result = json.loads(rest)
    assert first == f"serving on {result['address']}\n"
    assert result["seconds"] >= 0


@pytest.mark.parametrize("fault", ["port", "model", "folder", "off loopback", "host", "no FAISS"])
def test_what_prevents_a_start_is_one_sentence_and_status_2(model: Path, tmp_path: Path, fault: str) -> None:
    galleries = tmp_path / "g"
    words: list[str] = []
    match fault:
        case "port":
            holder = grpc.server(None, options=[("grpc.so_reuseport", 0)])  # type: ignore[arg-type]
            words = ["--port", str(holder.add_insecure_port("127.0.0.1:0"))]
            holder.start()
        case "model":
            model.write_bytes(b"no model")
        case "folder":
            galleries.write_bytes(b"a file")
        case "host":
            words = ["--host", "a" * 64 + ".invalid"]
        case "off loopback":
            words = ["--host", "0.0.0.0"]
    line = command(model, galleries, *words)
    if fault == "no FAISS":
        without = "import sys; sys.modules['faiss'] = None; import crossbatch; sys.exit(crossbatch.main())"
        line[1:3] = ["-c", without]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    if fault == "port":
        holder.stop(None).wait()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_folder_of_galleries_that_is_not_there_is_told_before_models_are_loaded(
    model: Path, tmp_path: Path, workers: str
) -> None:
    place = tmp_path / "shop"
    directory = GalleryDirectory(place / "galleries")
    directory.create("birds", model_name="tiny", fingerprint="a" * 64, dimension=4)
    for given, says in (
        ("galeries", f"--galleries {place}/galeries is not there; did you mean {place}/galleries? If not, "),
        ("no/other", f"--galleries {place}/no/other is not there, nor is {place}/no; make it first: "),
        ("galleries/birds", "birds is a gallery itself; give the folder that it is in, "),
    ):
        words = ["serve", "--model", str(model), "--galleries", str(place / given), "--workers", workers]
        ended = subprocess.run(
            [sys.executable, "-m", "crossbatch", *words], capture_output=True, text=True, timeout=30, cwd=ROOT
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.count("\n") == 1
        assert ended.stderr.startswith("crossbatch serve: ")
        assert says in ended.stderr
    assert [each.name for each in place.iterdir()] == ["galleries"]


class Nursery:
    """Starts real server processes quickly."""

    def __init__(self, model: Path, galleries: Path) -> None:
        self.settings = {
            "model": [str(model)], "galleries": str(galleries), "port": 0, "log_level": "ERROR", "threads": 1,
        }  # fmt: skip
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=pipe, stdout=pipe, text=True, cwd=ROOT
        )

    def start(self) -> tuple[int, str]:
        """A new server; its process id and address."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(self.settings) + "\n")
        self.process.stdin.flush()
        child, line = json.loads(self.process.stdout.readline())
        return int(child), str(line.split()[-1])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


def write_until_killed(
    address: str, batches: list[list[str]], acknowledged: set[str], begun: threading.Event
) -> None:
    """Store one batch after the other; those that were acknowledged are remembered."""
    with Client(address, retries=0, timeout=5) as client, suppress(CrossbatchError):
        for number in range(100_000):
            keys = [f"{len(batches)}-{i}" for i in range(1 + number % 5)]
            batches.append(keys)
            client.upsert("birds", [Item(key, vector=unit(hash_of(key)), label=key) for key in keys])
            acknowledged.update(keys)
            begun.set()


def hash_of(key: str) -> int:
    return int.from_bytes(key.encode(), "little")


@pytest.mark.timeout(120)
def test_kill_9_loses_nothing_acknowledged(model: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    galleries = tmp_path / "galleries"
    spec = Encoder(model).spec
    GalleryDirectory(galleries).create(
        "birds", model_name=spec.name, fingerprint=spec.fingerprint, dimension=spec.dimension
    ).close()
    nursery = Nursery(model, galleries)
    acknowledged: set[str] = set()
    batches: list[list[str]] = []
    try:
        for kill in range(KILLS + 1):
            child, address = nursery.start()
            with Client(address) as client:
                check_all_there(client, acknowledged, batches)
            if kill < KILLS:
                begun = threading.Event()
                writer = threading.Thread(
                    target=write_until_killed, args=(address, batches, acknowledged, begun)
                )
                writer.start()
                assert begun.wait(10)
                time.sleep(float(random.uniform(0, 0.1)))
            os.kill(child, signal.SIGKILL)
            if kill < KILLS:
                writer.join(10)
                assert not writer.is_alive()
    finally:
        nursery.close()
    assert len(acknowledged) > KILLS


def check_all_there(client: Client, acknowledged: set[str], batches: list[list[str]]) -> None:
    keys = sorted(acknowledged)
    vectors = np.array([unit(hash_of(key)) for key in keys], np.float32).reshape(-1, DIMENSION)
    # In three dimensions some of a few thousand vectors are one in float32, so the first hit may be another.
    for key, hits in zip(keys, client.search("birds", vectors=vectors, k=5), strict=True):
        own = {hit.key: hit for hit in hits}[key]
        assert own.label == key
        assert own.score > 1 - 1e-6
    for batch in batches:  # acknowledged or not, a call stored all of its items or none
        if batch[0] not in acknowledged:
            found = client.search("birds", keys=batch, k=1, on_error="return") if len(batch) > 1 else []
            assert len({isinstance(each, list) for each in found}) <= 1
