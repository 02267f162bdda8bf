"""How much of our code a call passes, against what a person can hold."""

from pathlib import Path

from benchmarks.trace_call import trace
from tests.tiny_model import write_tiny_model


def test_a_search_by_photo_passes_few_files_functions_and_threads(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.onnx")
    found = trace(tmp_path / "tiny.onnx")
    search = found["search by photo"]
    assert search["files"] <= 20
    assert search["calls"] <= 150
    assert search["thread_changes"] <= 3
    assert set(found) == {"indexed image", "search by photo", "search by vector", "embed", "upsert"}
