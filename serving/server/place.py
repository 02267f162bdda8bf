"""The folder of galleries, looked at before a server starts: a misspelt one is not served as an empty one."""

from difflib import get_close_matches
from pathlib import Path

from serving.errors import BadSetting, NotFound
from serving.gallery.store.schema import FILE_NAME

__all__ = ["check_place"]


def check_place(folder: Path) -> None:
    """Refuse a folder that cannot be meant. One that is missing is made with the first gallery.

    Args:
        folder: That of `--galleries`.

    Raises:
        NotFound: if it is missing, and galleries lie in one beside it that is written nearly so, or what it
            would lie in is missing as well.
        BadSetting: if it is a gallery itself.
    """
    if (folder / FILE_NAME).is_file():
        raise BadSetting(
            f"--galleries {folder} is a gallery itself; give the folder that it is in, "
            f"{folder.absolute().parent}"
        )
    if folder.exists():
        return
    if nearest := get_close_matches(folder.name, _shelves_beside(folder), 1):
        hint = f"did you mean {folder.parent / nearest[0]}? If not, make the folder first: mkdir {folder}"
        raise NotFound(f"--galleries {folder} is not there; {hint}")
    if not folder.absolute().parent.exists():
        raise NotFound(
            f"--galleries {folder} is not there, nor is {folder.parent}; make it first: mkdir -p {folder}"
        )


def _shelves_beside(folder: Path) -> list[str]:
    """The names of folders with galleries."""
    try:
        return sorted({each.parent.parent.name for each in folder.parent.glob(f"*/*/{FILE_NAME}")})
    except OSError:
        return []
