"""Two folders get each other's name in one step, or nothing happens and the reason is said."""

import errno
from pathlib import Path

import pytest

from serving.errors import CrossbatchError, NotFound, Overloaded, ReadOnly, Unavailable
from serving.gallery import exchange as exchanging
from serving.gallery.exchange import exchange


def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    return tmp_path / "a", tmp_path / "b"


def test_two_folders_get_each_others_name(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    exchange(first, second)
    assert (first / "file").read_text() == "b"
    assert (second / "file").read_text() == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    with pytest.raises(NotFound, match="a or c is not there any more; the gallery was dropped"):
        exchange(first, tmp_path / "c")
    assert (first / "file").read_text() == "a"
    assert (second / "file").read_text() == "b"


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EINVAL, Unavailable, "file system of .*a cannot exchange two folders.*keep the galleries"),
        (errno.ENOSYS, Unavailable, "cannot exchange"),
        (errno.ENOTSUP, Unavailable, "cannot exchange"),
        (errno.EROFS, ReadOnly, "read-only"),
        (errno.EACCES, ReadOnly, "permission denied"),
        (errno.ENOSPC, Overloaded, "full"),
        (errno.EIO, Unavailable, "check permissions and disk"),
    ],
)
def test_refusals_of_the_system_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[CrossbatchError], words: str
) -> None:
    monkeypatch.setattr(exchanging, "_call", lambda _: lambda first, second: number)
    with pytest.raises(kind, match=words) as caught:
        exchange(*folders(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_system_without_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanging._call("darwin") is None or exchanging._call("linux") is None
    monkeypatch.setattr(exchanging, "_call", lambda _: None)
    with pytest.raises(Unavailable, match="not implemented"):
        exchange(*folders(tmp_path))
