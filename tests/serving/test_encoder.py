"""A model file at work: right numbers, only the nodes asked for, and every failure in one sentence."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from serving.cores import usable_cores
from serving.errors import BadArtifact, BadSetting, InvalidArgument, Overloaded
from serving.model import encoder as module
from serving.model.encoder import Encoder, cpu_flags
from serving.model.provider import set_up
from serving.model.spec import keep_outputs
from tests.pictures import encoded
from tests.tiny_model import SIZE, tiny_graph, write_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model.onnx")


@pytest.fixture(scope="module")
def encoder(path: Path) -> Encoder:
    return Encoder(str(path), threads=1)  # as one types it


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ONNX Runtime is given to load: models, options and providers."""
    real, given = onnxruntime.InferenceSession, list[Any]()

    def session(model: bytes, options: Any, providers: list[Any]) -> Any:
        given.append((model, options, providers))
        return real(model, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    return given


def _images(batch: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (batch, SIZE, SIZE, 3), dtype=np.uint8)


def _oracle(images: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    means = images.astype(np.float64).mean(axis=(1, 2)) + np.arange(1.0, 4.0)
    return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True))


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_encode_gives_unit_rows(encoder: Encoder, batch: int) -> None:
    images = _images(batch)
    embeddings = encoder.encode(images)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, _oracle(images), atol=1e-6)


def test_a_session_that_is_loaded_holds_up_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, loading = Encoder(path, threads=1), threading.Event()
    load = encoder._load
    monkeypatch.setattr(encoder, "_load", lambda *given: loading.wait(20) and load(*given))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(encoder.encode, _images(1), threads=2)
        assert len(encoder.encode(_images(1))) == 1
        assert not other.done()
        loading.set()


def test_only_the_nodes_asked_for_run(encoder: Encoder) -> None:
    """The histogram branch of the tiny model fails for a batch of two, so whether it ran is seen."""
    assert encoder.run(_images(2), "embeddings").keys() == {"embeddings"}
    assert encoder.run(_images(1)).keys() == {"embeddings", "histograms"}
    with pytest.raises(BadArtifact, match="the model tiny fails on a batch of 2 images: "):
        encoder.run(_images(2), "histograms")


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((SIZE, SIZE, 3), np.uint8),
        np.zeros((1, SIZE, SIZE + 1, 3), np.uint8),
        np.zeros((1, 3, SIZE, SIZE), np.uint8),
        np.zeros((0, SIZE, SIZE, 3), np.uint8),
        np.zeros((1, SIZE, SIZE, 3), np.float32),
        np.zeros((1, SIZE, SIZE, 3), np.int8),
    ],
)
def test_wrong_images_are_refused(encoder: Encoder, images: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"takes images as uint8 \(B, 8, 8, 3\) .* and was given "):
        encoder.encode(images)
    with pytest.raises(InvalidArgument, match="has no output 'logits'; it has embeddings, histograms"):
        encoder.run(_images(1), "logits")


def test_preprocess_follows_the_spec(encoder: Encoder) -> None:
    pixels = encoder.preprocess(encoded(Image.new("RGB", (20, 30), (9, 8, 7))))
    assert pixels.shape == (SIZE, SIZE, 3)
    assert (pixels == [9, 8, 7]).all()


def test_what_runs_is_what_was_proven(path: Path, tmp_path: Path, loads: list[Any]) -> None:
    """The file may be replaced between the proof and the load: the bytes that were proven are loaded."""
    proven, file = path.read_bytes(), tmp_path / "model.onnx"
    file.write_bytes(proven)
    encoder = Encoder(file, threads=1)
    write_tiny_model(file, tiny_graph(size=9), image_size=9)
    encoder.run(_images(1), "embeddings", "histograms")
    kept = [keep_outputs(proven, {"embeddings"}), keep_outputs(proven, {"embeddings", "histograms"})]
    assert [model for model, *_ in loads] == kept


def test_graph_that_does_not_fit_its_spec(tmp_path: Path) -> None:
    with pytest.raises(
        BadArtifact, match=r"does not fit its ModelSpec: .* embeddings float32 \(B, 4\) are needed"
    ):
        Encoder(write_tiny_model(tmp_path / "m.onnx", dimension=4))
    with pytest.raises(BadArtifact, match=r"does not fit its ModelSpec: .* images uint8 \(B, 9, 9, 3\)"):
        Encoder(write_tiny_model(tmp_path / "m.onnx", image_size=9))


def test_session_is_set_up_for_a_server(path: Path, loads: list[Any]) -> None:
    Encoder(path)
    Encoder(path, threads=3)
    assert [options.intra_op_num_threads for _, options, _ in loads] == [usable_cores(), 3]
    for _, options, _ in loads:
        assert options.inter_op_num_threads == 1
        assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.parametrize(
    ("provider", "name", "extra", "lacks"),
    [
        ("openvino", "OpenVINOExecutionProvider", "openvino", "libraries"),
        ("cuda", "CUDAExecutionProvider", "gpu", "no GPU"),
        ("tensorrt", "TensorrtExecutionProvider", "gpu", "no GPU, or no TensorRT"),
    ],
)
def test_a_provider_that_is_not_offered_or_does_not_start_is_an_error(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loads: list[Any],
    provider: Any,
    name: str,
    extra: str,
    lacks: str,
) -> None:
    """ONNX Runtime drops a provider that fails and goes on with the CPU; the session's own list tells."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BadSetting, match=rf"offers CPUExecutionProvider; install crossbatch\[{extra}\]"):
        Encoder(path, provider=provider)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [name])
    with pytest.raises(BadSetting, match=f"ONNX Runtime could not start it: .*{lacks}.*another provider$"):
        Encoder(path, provider=provider)
    ((_, _, asked),) = loads
    assert asked[0][0] == name
    assert asked[-1][0] == "CPUExecutionProvider"


def test_providers_compute_in_float32_and_look_for_no_kernel_anew() -> None:
    ((_, cuda), _) = set_up("cuda", threads=1, cores=1)
    assert cuda == {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}
    tensorrt = set_up("tensorrt", threads=1, cores=1)
    assert [name for name, _ in tensorrt][1] == "CUDAExecutionProvider"
    assert tensorrt[1][1] == cuda


@pytest.mark.parametrize(
    ("threads", "cores", "streams", "all_threads"),
    [(1, 1, "1", "1"), (1, 4, "4", "4"), (4, 4, "1", "4"), (6, 4, "1", "6")],
)
def test_openvino_runs_as_many_batches_side_by_side_as_cores_hold(
    threads: int, cores: int, streams: str, all_threads: str
) -> None:
    ((_, options), _) = set_up("openvino", threads=threads, cores=cores)
    asked = json.loads(options["load_config"])["CPU"]
    assert (asked["NUM_STREAMS"], asked["INFERENCE_NUM_THREADS"]) == (streams, all_threads)
    assert asked["INFERENCE_PRECISION_HINT"] == "f32"


def test_missing_onnxruntime_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BadSetting, match=r"install crossbatch\[cpu\], or crossbatch\[gpu\]"):
        Encoder(path)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("[ONNX] Failed to allocate memory\nmore"), Overloaded, "2 images: .*; send fewer"),
        (MemoryError(), Overloaded, "no memory for a batch of 2 images: it needs more memory than there is"),
        (RuntimeError("[ONNX] : 1 : FAIL : Conv."), BadArtifact, "fails on a batch of 2 images: .* Conv$"),
    ],
)
def test_failures_of_a_run_are_translated(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    encoder, failing = Encoder(path, threads=1), Mock()
    failing.run.side_effect = error
    monkeypatch.setattr(encoder, "_session", lambda *_: failing)
    with pytest.raises(kind, match=message) as caught:
        encoder.encode(_images(2))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx512_vnni avx2 avx512f\nbugs\t: avx_vnni\n",
            "avx2 avx512f avx512_vnni",
        ),
        ("processor\t: 0\nFeatures\t: fp asimd\n", ""),
        (None, ""),
    ],
)
def test_flags_of_the_cpu(
    given: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        (tmp_path / "cpuinfo").write_text(given)
    monkeypatch.setattr(module, "_CPU", tmp_path / "cpuinfo")
    assert cpu_flags() == tuple(found.split())


def test_an_int8_file_of_another_cpu_is_told_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: ("avx2", "avx512_vnni"))
    lower: dict[str, Any] = {"precision": "int8", "fp32_fingerprint": "0" * 64}
    Encoder(write_tiny_model(tmp_path / "same.onnx", cpu_flags=("avx2", "avx512_vnni"), **lower))
    Encoder(write_tiny_model(tmp_path / "fp32.onnx"))
    assert not caplog.records
    for flags, told in (
        (("avx2",), "with avx2, and this one has avx2 avx512_vnni"),
        ((), "with none of its"),
    ):
        Encoder(write_tiny_model(tmp_path / "other.onnx", cpu_flags=flags, **lower))
        assert f"{tmp_path / 'other.onnx'} was measured in int8 on a CPU {told}" in caplog.records[-1].message
