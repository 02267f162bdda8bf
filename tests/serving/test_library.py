"""The files that --model stands for."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from serving.engine import library
from serving.engine.library import Library, served_name
from serving.errors import BadArtifact, BadSetting, CrossbatchError, NotFound
from serving.settings import Settings
from tests.serving.rpc_fakes import FakeSpec
from tests.tiny_model import write_tiny_model


def library_of(*words: object, **settings: Any) -> Library:
    return Library(
        Settings.model_validate(
            {"model": [str(word) for word in words], "galleries": Path("galleries")} | settings
        )
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny.onnx")


def test_files_folders_and_names_are_found_in_the_order_given(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a-2.onnx", "b.onnx", "a.onnx", "notes.txt", "c.onnx.part"):
        shutil.copy(model, folder / name)

    sources = library_of(f"mine={model}", folder, model).look()

    assert [(each.name, each.place) for each in sources] == [
        ("mine", str(model)),
        ("a", str(folder / "a.onnx")),
        ("a-2", str(folder / "a-2.onnx")),
        ("b", str(folder / "b.onnx")),
        ("", str(model)),
    ]
    assert sources[0].load().spec.name == "tiny"


def test_a_path_may_hold_an_equals_sign(model: Path, tmp_path: Path) -> None:
    odd = tmp_path / "lr=0.1.onnx"
    shutil.copy(model, odd)
    (source,) = library_of(odd).look()
    assert (source.name, source.place) == ("", str(odd))
    (named,) = library_of(f"n={odd}").look()
    assert (named.name, named.place) == ("n", str(odd))


def test_a_file_that_was_replaced_or_written_to_has_another_stamp(model: Path, tmp_path: Path) -> None:
    library = library_of(model)

    def stamp() -> object:
        return library.look()[0].stamp

    first = stamp()
    assert stamp() == first
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = stamp()
    assert touched != first
    twin = tmp_path / "twin"
    shutil.copy2(model, twin)
    os.utime(twin, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    os.replace(twin, model)  # same size and times
    assert stamp() != touched


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("nowhere.onnx", NotFound, "nowhere.onnx is not there"),
        ("empty", BadSetting, "empty holds no .onnx file"),
        ("name=empty", BadSetting, "names a folder; only a file can be served by another name"),
        ("=tiny.onnx", BadSetting, "give FILE, FOLDER or NAME=FILE"),
        ("name=", BadSetting, "give FILE, FOLDER or NAME=FILE"),
        ("tiny.onnx/below", BadArtifact, "cannot be read: Not a directory"),
    ],
)
def test_words_that_stand_for_no_file_are_refused_in_one_sentence(
    model: Path, monkeypatch: pytest.MonkeyPatch, word: str, error: type[CrossbatchError], message: str
) -> None:
    (model.parent / "empty").mkdir()
    monkeypatch.chdir(model.parent)
    with pytest.raises(error, match=message):
        library_of(word).look()


def test_messages_to_callers_do_not_tell_where_models_lie() -> None:
    library = library_of(
        "/srv/secret/a.onnx", "n=/srv/secret/deep/b.onnx", "/opt/models", "here.onnx", "/top.onnx"
    )
    for text, told in (
        ("/srv/secret/a.onnx is damaged", "a.onnx is damaged"),
        ("/srv/secret/deep/b.onnx and here.onnx", "b.onnx and here.onnx"),
        ("the folder /opt/models holds", "the folder models holds"),
        ("/opt/models/c.onnx is damaged", "models/c.onnx is damaged"),
        ("/top.onnx", "/top.onnx"),
    ):
        assert library.hide(text) == told


@pytest.mark.parametrize(
    ("threads", "workers", "each"), [(0, 1, 8), (0, 2, 4), (0, 3, 2), (0, 9, 1), (3, 2, 3)]
)
def test_cores_are_shared_among_the_workers_and_never_left_to_the_runtime(
    model: Path, monkeypatch: pytest.MonkeyPatch, threads: int, workers: int, each: int
) -> None:
    """In a container the count that ONNX Runtime finds by itself fails (onnxruntime#8313)."""
    monkeypatch.setattr(library, "usable_cores", lambda: 8)
    (source,) = library_of(model, threads=threads, workers=workers).look()
    assert source.load().threads == each


@pytest.mark.parametrize(
    ("precision", "name"), [("fp32", "fake"), ("fp16", "fake-fp16"), ("int8", "fake-int8")]
)
def test_precisions_of_one_run_go_by_different_names(precision: str, name: str) -> None:
    spec: Any = FakeSpec(precision=precision)
    assert served_name(spec) == name
