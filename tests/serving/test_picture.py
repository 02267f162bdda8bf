"""Where images are: whole files and parts of files, read to the byte and bounded."""

import os
from pathlib import Path

import pytest

from serving.catalog.picture import File, Member
from serving.errors import BadImage
from serving.model.preprocess import MAX_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "box").write_bytes(b"--image--")
    return tmp_path / "box"


def member(archive: Path, offset: int, size: int) -> Member:
    return Member(archive, "a/b.jpg", offset, size, archive.stat().st_mtime_ns)


def test_a_file_and_a_member_say_where_they_are(path: Path) -> None:
    for one, at, data in ((File(path), path, b"--image--"), (member(path, 2, 5), path / "a/b.jpg", b"image")):
        assert str(one) == str(one.path) == str(at)
        assert one.stamp() == (len(data), path.stat().st_mtime_ns)
        assert one.read_bytes() == data


def test_what_is_too_long_is_refused_by_its_size(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for one in (File(path), member(path, 0, MAX_BYTES + 1)):
        with pytest.raises(BadImage, match="the file has 33554433 bytes; the limit is 33554432"):
            one.read_bytes()
    assert len(member(path, 1, MAX_BYTES).read_bytes()) == MAX_BYTES


def test_what_is_gone_cut_off_or_changed_is_an_error_of_the_disk(path: Path) -> None:
    with pytest.raises(OSError, match=r"b\.jpg has 8 bytes, of which 7 could be read"):
        member(path, 2, 8).read_bytes()
    listed = member(path, 0, 5)
    os.utime(path, ns=(0, listed.mtime_ns + 1))
    with pytest.raises(OSError, match="box has changed since its members were listed"):
        listed.read_bytes()
    path.unlink()
    for act in (File(path).read_bytes, File(path).stamp):
        with pytest.raises(FileNotFoundError):
            act()
