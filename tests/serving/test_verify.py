"""Each kind of damage is done to a gallery, and verifying names it; a sound gallery is never accused."""

import dataclasses
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.errors import BadArtifact, NotFound
from serving.gallery.gallery import Gallery, GalleryItem
from serving.gallery.index.index import IndexMetadata
from serving.gallery.item import Source
from serving.gallery.search.columns import Columns
from serving.gallery.search.segment import SealedSegment
from serving.gallery.store.schema import PUBLISHED, item_checksum, publication_checksum
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import State
from serving.gallery.verify import Verification, verify
from tests.serving.vectors import MANUAL, created, flip, sql, units

COUNT, DIMENSION = 60, 16
JPEG = b"\xff\xd8\xffpicture\xff\xd9"


def items(count: int = COUNT, *, seed: int = 0) -> list[GalleryItem]:
    source = Source("shop", 1, 2, b"d" * 32)
    return [
        GalleryItem(f"k{i}", row, f"label{i % 5}", "", {"i": i}, source, JPEG if i % 7 == 0 else b"")
        for i, row in enumerate(units(count, DIMENSION, seed))
    ]


def made(path: Path) -> Gallery:
    return created(path, DIMENSION, thumbnail_side=64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A gallery of 60 items, 52 of them in its index, of which 2 are deleted since and one is replaced."""
    with closing(made(tmp_path / "birds")) as gallery:
        every = items()
        gallery.upsert(every[:52])
        gallery.rebuild()
        gallery.delete(["k1", "k2"])
        gallery.upsert([*every[52:], every[3]])
    return tmp_path / "birds"


def problem(path: Path) -> str:
    (found,) = verify(path).problems
    assert "\n" not in found
    return found


def state_of(path: Path) -> State:
    with closing(Store(path / "gallery.sqlite")) as store, store.read() as reader:
        return reader.state()


def publish(path: Path, change: str, **values: Any) -> None:
    """Change what is said of the index, with its right checksum, as a bug would."""
    with closing(Store(path / "gallery.sqlite")) as store, store.write() as writer:
        execute = writer.reader.sql.execute
        execute(f"UPDATE state SET {change}", values)
        said = execute(f"SELECT {PUBLISHED} FROM state").fetchone()
        execute("UPDATE state SET published_checksum = ?", (publication_checksum(*said),))


def test_a_sound_gallery(path: Path) -> None:
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    told: list[tuple[str, int, int]] = []
    assert verify(path, advance=lambda *now: told.append(now)) == Verification(
        items=58, fresh=9, indexed=52, removals=3, thumbnails=9
    )
    assert told[-1] == ("verify", 58, 58)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    with pytest.raises(NotFound):
        verify(path.with_name("none"))


def test_an_index_replaced_meanwhile_is_no_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    load = SealedSegment.load

    def overtaken(file: Path, *state: Any, **more: Any) -> SealedSegment:
        opened.append(file)
        if len(opened) == 1:
            with closing(Gallery.open(path, policy=MANUAL)) as gallery:
                gallery.rebuild()
        return load(file, *state, **more)

    monkeypatch.setattr(SealedSegment, "load", overtaken)
    assert verify(path).problems == []
    assert len(set(opened)) == 2


@pytest.mark.parametrize("content", [items()[5].vector.tobytes(), b'label0{"i":5}'])
def test_a_bit_of_an_item(path: Path, content: bytes) -> None:
    file = path / "gallery.sqlite"
    flip(file, file.read_bytes().index(content) + 2)
    assert "'k5': its checksum" in problem(path)


@pytest.mark.parametrize(
    ("label", "metadata", "words"),
    [
        (b"\xff", b"{}", "a text of it cannot be read"),
        (b"", b"\xff\xfe{\0}\0", "a text of it cannot be read"),  # which JSON would take for UTF-16
        (b"", b"[]", "its metadata is no JSON object"),
    ],
)
def test_bytes_that_are_no_text_of_right_checksum(
    path: Path, label: bytes, metadata: bytes, words: str
) -> None:
    texts = b"\0".join((b"k5", label, b"", metadata))
    checksum = zlib.crc32(items()[5].vector.tobytes(), zlib.crc32(texts))
    change = "label = CAST(:label AS TEXT), metadata = CAST(:metadata AS TEXT), checksum = :checksum"
    given = {"label": label, "metadata": metadata, "checksum": checksum}
    sql(path, f"UPDATE items SET {change} WHERE key = 'k5'", **given)
    assert f"'k5': {words}" in " ".join(verify(path).problems)


def index_file(path: Path) -> Path:
    return path / state_of(path).index_file


@pytest.mark.parametrize("suffix", [".faiss", ".columns"])
@pytest.mark.parametrize("harm", [lambda file: flip(file, 200), Path.unlink])
def test_an_index_file_that_is_another(path: Path, suffix: str, harm: Callable[[Path], None]) -> None:
    harm(index_file(path).with_suffix(suffix))
    assert "the index is lost" in problem(path)
    with closing(Gallery.open(path, policy=MANUAL)) as gallery:
        gallery.rebuild()
    assert verify(path).problems == []


def test_columns_of_other_items(path: Path) -> None:
    columns = Columns.of([f"label{i % 5}" for i in range(51)], [f'{{"i":{i}}}' for i in range(51)])
    facts = IndexMetadata.from_json(state_of(path).index_facts)
    checksum = columns.save(index_file(path).with_suffix(".columns"))
    facts = dataclasses.replace(facts, columns_checksum=checksum)
    publish(path, "index_facts = :facts", facts=facts.to_json())
    assert "holds 52 items, and the labels and metadata of 51" in problem(path)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DELETE FROM removals WHERE id = 1", "version 2 of an item, which is gone and not noted as removed"),
        (
            "INSERT INTO removals (seq) SELECT seq FROM items WHERE key = 'k7'",
            "'k7' is there, and is noted as removed",
        ),
        (
            "UPDATE state SET covers_seq = covers_seq + 64",
            "what its state tells of the index has been altered",
        ),
        (
            "UPDATE sqlite_sequence SET seq = seq - 1 WHERE name = 'items'",
            "'k3' is newer than the newest there ever was",
        ),
        ("UPDATE items SET digest = x'00' WHERE key = 'k8'", "'k8': the file it was made from"),
        ("UPDATE items SET given = '00000000[]' WHERE key = 'k8'", "what its source gave has been altered"),
    ],
)
def test_tables_that_do_not_fit_each_other(path: Path, statement: str, words: str) -> None:
    sql(path, statement)
    assert words in problem(path)


@pytest.mark.parametrize("number", [5, 55])  # one of the index, and one that is newer
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda vector: vector * np.nan, "not finite"),
        (lambda vector: vector * np.inf, "not finite"),
        (lambda vector: vector / 2, "norm 0.5, expected 1"),
        (lambda vector: vector * 0, "norm 0, expected 1"),
        (lambda vector: vector[:-1], "60 bytes long, expected 64"),
    ],
)
def test_a_vector_out_of_bounds(
    path: Path, number: int, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    """Another vector, with its right checksum, as a bug would write it."""
    with np.errstate(invalid="ignore"):
        vector = change(items()[number].vector).astype("<f4").tobytes()
    checksum = item_checksum(f"k{number}", f"label{number % 5}", "", f'{{"i":{number}}}', vector)
    change_of = f"UPDATE items SET vector = :vector, checksum = :checksum WHERE key = 'k{number}'"
    sql(path, change_of, vector=vector, checksum=checksum)
    found = problem(path)
    assert f"'k{number}'" in found
    assert words in found


def test_an_index_of_other_vectors_with_its_right_checksum(path: Path, tmp_path: Path) -> None:
    with closing(made(tmp_path / "other")) as other:
        other.upsert(items(seed=1)[:52])
        other.rebuild()
    index_file(path).write_bytes(index_file(tmp_path / "other").read_bytes())
    checksum = state_of(tmp_path / "other").index_checksum
    publish(path, "index_checksum = :checksum", checksum=checksum)
    found = verify(path).problems
    assert len(found) == 21
    assert "'k0' has another vector in the index" in found[0]
    assert found[-1] == "29 more items, each of which has another vector in the index"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("index_count = 51", "holds 52 items, and is said to hold 51"),
        ("covers_removal = 99", "cover writes that never were"),
        ("covers_seq = 53", "'k52' is missing from the index"),
        ("covers_seq = 50", "holds items that are said to be newer"),
        ("index_file = '', index_count = 0", "29 more items, each of which is missing from the index"),
    ],
)
def test_a_state_that_is_wrong(path: Path, change: str, words: str) -> None:
    publish(path, change)
    assert words in " ".join(verify(path).problems)


def test_thumbnails(path: Path) -> None:
    flip(path / "gallery.sqlite", (path / "gallery.sqlite").read_bytes().index(JPEG) + 4)
    assert "has been altered: its checksum does not match" in problem(path)
    sql(path, "DELETE FROM thumbnails WHERE seq <> 8")
    right = zlib.crc32(b"GIF")
    sql(path, f"UPDATE thumbnails SET jpeg = CAST('GIF' AS BLOB), checksum = {right} WHERE seq = 8")
    assert "thumbnail 8 is no JPEG" in problem(path)
    sql(path, "UPDATE thumbnails SET seq = 1000 WHERE seq = 8")
    assert "thumbnail 1000 belongs to no item" in problem(path)


def test_pages_that_cannot_be_read_at_all(path: Path) -> None:
    file = path / "gallery.sqlite"
    content = bytearray(file.read_bytes())
    page = content.index(items()[10].vector.tobytes()) // 8192 * 8192
    content[page : page + 8192] = b"\x77" * 8192
    file.write_bytes(content)
    found = verify(path).problems
    assert any("damaged" in line or "SQLite finds" in line for line in found)
    file.write_bytes(b"x" * 9000)
    with pytest.raises(BadArtifact, match="damaged"):
        verify(path)
