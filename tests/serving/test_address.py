"""Where galleries lie: what is a folder, what a Milvus, and what is neither."""

from pathlib import Path

import pytest

import crossbatch
from serving.errors import BadSetting
from serving.gallery.address import placed
from serving.settings import Settings


def served(galleries: str | Path, **more: str) -> Settings:
    return Settings.model_validate({"model": ["model.onnx"], "galleries": galleries, **more})


@pytest.mark.parametrize(
    "place", ["galleries", "/srv/a:b/milvus", "milvus", "milvus/galleries", "../milvus-1"]
)
def test_a_folder_is_a_path(place: str) -> None:
    assert served(place).galleries == served(Path(place)).galleries == Path(place)
    assert placed("birds", Path(place)) == (Path(place), "birds")
    assert placed(f"{place}/birds", Path("other")) == (Path(place), "birds")


@pytest.mark.parametrize(
    "place",
    [
        "milvus://localhost",
        "milvus://10.0.0.1:19530",
        "milvuss://db.example:443/shop",
    ],
)
def test_a_milvus_is_text(place: str) -> None:
    settings = served(place)
    whole = {"milvus://localhost": "milvus://localhost:19530"}.get(place, place)
    assert settings.galleries == served(f"{place}/").galleries == whole
    assert served(settings.model_dump(mode="json")["galleries"]).galleries == whole  # for the workers
    assert placed("birds", place) == (place, "birds")
    assert placed(f"{place}/birds", Path("other")) == (whole, "birds")
    with pytest.raises(ValueError, match="--search-device is for galleries in a folder"):
        served(place, search_device="cuda")


WRONG = (
    "milvus:/host:19530 milvus:host milvus//host Milvus://host mivlus://host http://host:19530 "
    "milvus:// milvus://host:port milvus://host:99999 milvus://host/a/b milvus://[::1]:19530"
)


@pytest.mark.parametrize("place", WRONG.split())
def test_what_is_neither_is_told(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert crossbatch.main(["gallery", "list", "--galleries", place]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"crossbatch gallery: '{place.rstrip('/')}' is no place of galleries: give a folder, or a "
    )
    with pytest.raises(BadSetting, match="a gallery in it is milvus://HOST:19530/NAME"):
        placed(f"{place}/birds/x", Path("other"))


def test_a_password_in_an_address_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["list", "--galleries", "milvus://me:secret@host"],
        ["copy", "a", "milvus://me:secret@host/b"],
    ):
        assert crossbatch.main(["gallery", *arguments]) == 2
        told = capsys.readouterr().err
        assert "put USER:PASSWORD into the environment variable CROSSBATCH_MILVUS_TOKEN" in told
        assert "secret" not in told


def test_a_milvus_without_a_name_is_told() -> None:
    for given in ("milvus://host:19530", "milvus://host:19530/"):
        with pytest.raises(BadSetting, match=r"milvus://host:19530/? names a Milvus and no gallery"):
            placed(given, Path("galleries"))
