"""A file is read whole, or refused at once."""

import os
from pathlib import Path

import pytest

from serving.whole import read_whole


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 99, 100):
        path.write_bytes(bytes(size))
        assert read_whole(path, 100) == bytes(size)
    path.write_bytes(bytes(101))
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_whole(path, 100)
    assert len(read_whole(Path("/proc/self/status"), 1 << 20)) > 100  # which says that it has none


def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            read_whole(path, 100)
    with pytest.raises(IsADirectoryError):
        read_whole(tmp_path, 100)
