"""The folder of galleries, looked at before a server starts: a misspelt one is not served as an empty one."""

from difflib import get_close_matches
from pathlib import Path

from serving.errors import BadSetting, NotFound
from serving.gallery.store.schema import FILE_NAME

__all__ = ["check_place"]


def check_place(folder: Path) -> None:
    """Refuse a folder that cannot be meant; what is in it may be looked at later.

    Args:
        folder: That of `--galleries`.

    Raises:
        NotFound: if it is not there; names one beside it that is written nearly so.
        BadSetting: if it is a gallery itself.
    """
    if not folder.exists():
        nearest = get_close_matches(folder.name, _folders_beside(folder), 1)
        hint = f"did you mean {folder.parent / nearest[0]}? If not" if nearest else "if none is made yet"
        raise NotFound(f"--galleries {folder} is not there; {hint}, make the folder first: mkdir -p {folder}")
    if (folder / FILE_NAME).is_file():
        raise BadSetting(
            f"--galleries {folder} is a gallery itself; give the folder that it is in, "
            f"{folder.absolute().parent}"
        )


def _folders_beside(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.parent.iterdir() if each.is_dir()]
    except OSError:
        return []
