"""The folder of galleries, before anything is served from it."""

from pathlib import Path

import pytest

from serving.errors import BadSetting, NotFound
from serving.gallery.folder.directory import GalleryDirectory
from serving.rpc.server.place import check_place


def test_a_folder_that_is_missing_is_made_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "galleries-of-old").mkdir()  # much like it, yet without galleries
    check_place(tmp_path / "galleries")
    assert (tmp_path / "galleries").is_dir()
    assert [each.getMessage() for each in caplog.records] == [
        f"made the folder {tmp_path}/galleries, which holds no galleries yet"
    ]
    check_place(tmp_path / "galleries")
    assert len(caplog.records) == 1


def test_a_misspelt_folder_is_not_made(tmp_path: Path) -> None:
    shop = GalleryDirectory(tmp_path / "galleries")
    shop.create("birds", model_name="tiny", fingerprint="a" * 64, dimension=4)
    with pytest.raises(NotFound, match=r"did you mean .*/galleries\?"):
        check_place(tmp_path / "galeries")
    with pytest.raises(NotFound, match=r"nor is .*/no; make it first: mkdir -p"):
        check_place(tmp_path / "no" / "galleries")
    with pytest.raises(BadSetting, match="is a gallery itself"):
        check_place(tmp_path / "galleries" / "birds")
    assert [each.name for each in tmp_path.iterdir()] == ["galleries"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BadSetting, match="cannot be made: Permission denied"):
        check_place(tmp_path / "galleries")
