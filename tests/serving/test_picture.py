"""Where images are: whole files and parts of files, read to the byte, bounded, by threads and processes."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.catalog.picture import File, Member, Picture
from serving.errors import BadImage
from serving.model.preprocess import MAX_BYTES


def _member(archive: Path, name: str, offset: int, size: int) -> Member:
    return Member(archive, name, offset, size, archive.stat().st_mtime_ns)


def test_a_file_and_a_member_say_where_they_are_and_travel_to_processes(tmp_path: Path) -> None:
    path = tmp_path / "box"
    path.write_bytes(b"--image--")
    pictures: list[Picture] = [File(path), _member(path, "a/b.jpg", 2, 5)]
    for one, at, data in zip(pictures, (path, path / "a/b.jpg"), (b"--image--", b"image"), strict=True):
        assert str(one) == str(one.path) == str(at)
        assert one.read_bytes() == data
        assert one.stamp() == (len(data), path.stat().st_mtime_ns)
        copy = pickle.loads(pickle.dumps(one))
        assert copy == one
        assert hash(copy) == hash(one)
        assert copy.read_bytes() == data


def test_what_is_too_long_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for one in (File(path), _member(path, "a", 0, MAX_BYTES + 1)):
        with pytest.raises(BadImage, match="the file has 33554433 bytes; the limit is 33554432"):
            one.read_bytes()
        assert one.stamp()[0] == MAX_BYTES + 1
    assert len(_member(path, "a", 1, MAX_BYTES).read_bytes()) == MAX_BYTES


def test_what_is_not_there_whole_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "box"
    path.write_bytes(b"image")
    with pytest.raises(OSError, match=r"box/a has 4 bytes, of which 3 could be read"):
        _member(path, "a", 2, 4).read_bytes()
    whole = os.stat(path)
    longer = os.stat_result((*whole[:6], 9, *whole[7:10]))
    monkeypatch.setattr(os, "fstat", lambda handle: longer)
    with pytest.raises(OSError, match=r"box has 9 bytes and not the 5 that were read"):
        File(path).read_bytes()
    path.unlink()
    for act in (File(path).read_bytes, File(path).stamp):
        with pytest.raises(FileNotFoundError):
            act()


def test_a_member_of_an_archive_that_has_changed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "box"
    path.write_bytes(b"image")
    member = _member(path, "a", 0, 5)
    path.write_bytes(b"other")
    os.utime(path, ns=(0, member.mtime_ns + 1))
    with pytest.raises(OSError, match="box has changed since its members were listed"):
        member.read_bytes()


def test_many_threads_read_one_archive(tmp_path: Path) -> None:
    path = tmp_path / "box"
    path.write_bytes(b"".join(bytes([i]) * 100 for i in range(200)))
    members = [_member(path, str(i), 100 * i, 100) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(Member.read_bytes, members))
    assert found == [bytes([i]) * 100 for i in range(200)]
