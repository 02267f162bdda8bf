"""The benchmark of peers, in short: without any, with one that is made up, and with one that is not there."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest

from benchmarks import peers
from benchmarks.driving import messages
from benchmarks.driving.plain import Plain
from benchmarks.driving.rounds import Level
from benchmarks.driving.served import Failed
from benchmarks.load import pictures
from benchmarks.rivals import rival as module
from benchmarks.rivals.onnx_model import OnnxModel, Order
from benchmarks.rivals.rival import SETTINGS, Rival, check, requests, tuned
from protos import open_inference_pb2 as pb
from serving.model.encoder import Encoder
from serving.model.spec import keep_outputs, read_model
from tests.serving.scripts import scripted
from tests.tiny_model import SIZE


@pytest.fixture
def plain(model: Path, data: Path) -> Iterator[Plain]:
    with Plain(Encoder(model, threads=1), pictures(data, 4), threads=1) as loop:
        yield loop


@pytest.fixture
def order(model: Path) -> Order:
    pruned = model.with_name("pruned.onnx")
    pruned.write_bytes(keep_outputs(read_model(model)[0], ["embeddings"]))
    return Order(str(pruned), 1, SIZE, 0.875, "bicubic", True, 8, 2.0)


def test_a_short_run_without_peers(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{model} {data} --rounds 1 --seconds 0.1 --in-flight 8 --threads 1"
    assert peers.main([*words.split(), "--images-only", "--triton-python", sys.executable]) == 1
    shown = capsys.readouterr().out
    assert "- triton, images takes no part: ModuleNotFoundError: No module named 'pytriton'" in shown
    assert "| crossbatch, images | 8 |" in shown
    assert peers.main(words.split()) == 0  # there is nobody to be ahead of
    assert "| crossbatch, tensors | 8 |" in capsys.readouterr().out


@pytest.mark.parametrize("encoded", [True, False])
def test_requests_hold_what_gives_a_peer_our_embeddings(plain: Plain, order: Order, encoded: bool) -> None:
    model = OnnxModel(replace(order, encoded=encoded))
    made = requests(replace(order, encoded=encoded), plain.images, plain)
    for image, request in zip(plain.images, made, strict=True):
        found = messages.fields(request)
        tensor = messages.fields(found[5][0])
        assert (found[1], tensor[1]) == ([b"model"], [b"images"])
        (raw,) = found[7]
        if encoded:
            assert (tensor[2], raw[:4]) == ([b"BYTES"], struct.pack("<I", len(image)))
            embedded = model.embed([raw[4:]])
        else:
            assert (tensor[2], tensor[3]) == ([b"UINT8"], [bytes([1, SIZE, SIZE, 3])])
            embedded = model.embed_pixels(np.frombuffer(raw, np.uint8).reshape(1, SIZE, SIZE, 3))
        np.testing.assert_allclose(embedded, plain.embed([image]), atol=1e-6)


def test_a_peer_with_other_embeddings_or_none_takes_no_part(plain: Plain, order: Order) -> None:
    some, expected = requests(order, plain.images, plain), plain.embed(plain.images)
    read = pb.ModelInferRequest.FromString
    known = {read(each).raw_input_contents[0]: vector for each, vector in zip(some, expected, strict=True)}

    def answered(apart: float) -> Any:
        def reply(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            vector = known[request.raw_input_contents[0]] + np.float32(apart)
            return pb.ModelInferResponse(raw_output_contents=[vector.tobytes()])

        return scripted({"ModelInfer": reply})

    with answered(0) as server:
        check(server.address, some, expected)
    with answered(2e-4) as server, pytest.raises(Failed, match=r"from those of the plain loop by 0\.0002"):
        check(server.address, some, expected)
    broken: Any = scripted({"ModelInfer": lambda _: grpc.StatusCode.INTERNAL})
    with broken as server, pytest.raises(Failed, match="INTERNAL: scripted"):
        check(server.address, some, expected)


def test_the_setting_with_the_most_images_a_second_at_all_levels_is_taken(
    tmp_path: Path, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {8: (10, 90), 16: (40, 60), 32: (50, 50), 64: (90, 10)}

    @contextmanager
    def start(rival: Rival, log: Path) -> Iterator[Any]:
        if rival.order.delay_ms == 5.0:
            raise Failed("out of memory")
        yield SimpleNamespace(address=str(rival.order.max_batch))

    def closed(target: Any, *, in_flight: int, seconds: float) -> dict[str, Any]:
        return {"codes": {"OK": rates[int(target.address)][in_flight == 32]}, "seconds": 1.0}

    monkeypatch.setattr(module, "start", start)
    rival, client = Rival("triton", Path("python"), order), MagicMock(closed=closed)
    best = tuned(rival, client, tmp_path, tmp_path, in_flight=(1, 32), seconds=0.1)
    assert (best.order.max_batch, best.title) == (32, "triton, images")
    assert best.setting == "batches of up to 32, 2 ms"
    monkeypatch.setitem(SETTINGS, "triton", [(8, 5.0, 0)])
    with pytest.raises(Failed, match="out of memory"):
        tuned(rival, client, tmp_path, tmp_path, in_flight=(1, 32), seconds=0.1)


def test_crossbatch_must_be_ahead_of_peers_that_decode_too() -> None:
    def level(server: str, per_second: float) -> Level:
        return Level(server, 8, per_second=[per_second], plain_per_second=[100.0])

    ours = [level("crossbatch, images", 90), level("crossbatch, tensors", 96)]
    others = [level("triton, images", 60), level("mlserver, images", 95), level("triton, tensors", 120)]
    assert peers.compared([*ours, *others]) == [
        "- 8 in flight: 1.50 times triton, images: met",
        "- 8 in flight: 0.95 times mlserver, images: NOT MET",
        "- 8 in flight: 0.80 times triton, tensors: NOT MET",
    ]
