"""Files are written whole or not at all, whoever else writes them, and in the place of nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.errors import CrossbatchError
from training.loop.whole_file import aside_of, is_aside, write_file


def test_what_a_killed_process_left_aside_is_swept_and_what_another_writes_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    dead, alive = tmp_path / f".x.{ended.pid}.tmp", tmp_path / f".x.{os.getppid()}.tmp"
    dead.write_text("half")
    alive.write_text("half")
    write_file(tmp_path / "x", b"whole")
    assert sorted(tmp_path.iterdir()) == [alive, tmp_path / "x"]
    assert (tmp_path / "x").read_bytes() == b"whole"


def test_names_of_what_is_written_aside() -> None:
    assert is_aside(aside_of(Path("a/record.json")).name, "record.json")
    for name in (".record.json.tmp", ".record.json.x.tmp", "record.json.1.tmp", ".record.json.1.tmp2"):
        assert not is_aside(name, "record.json")


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CrossbatchError, match="no plain file"):
        write_file(tmp_path / "pipe", b"x")
    assert not (tmp_path / "pipe").is_file()
    with pytest.raises(CrossbatchError, match="cannot be written"):
        write_file(tmp_path, b"x")
