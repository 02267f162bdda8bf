"""The folder of galleries, before anything is served from it."""

from pathlib import Path

import pytest

from serving.errors import BadSetting, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.server.place import check_place


def test_a_folder_may_be_missing_and_is_left_for_the_first_gallery(tmp_path: Path) -> None:
    (tmp_path / "galleries-of-old").mkdir()  # much like it, yet without galleries
    check_place(tmp_path / "galleries")
    assert not (tmp_path / "galleries").exists()
    GalleryDirectory(tmp_path / "galleries").create(
        "birds", model_name="tiny", fingerprint="a" * 64, dimension=4
    )
    check_place(tmp_path / "galleries")


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
