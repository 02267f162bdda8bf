"""The format `csv`: a table with the columns `path` (or `image`) and `label`, `split` and `key` if wanted.

Any other column is metadata.
"""

import os
from pathlib import Path, PurePosixPath
from typing import Final

from serving.catalog.picture import File
from serving.catalog.rows import SPLITS, Catalog, Row, make_catalog, path_text
from serving.catalog.table import column_reader, read_lines
from serving.catalog.walk import which_are_files
from serving.errors import BadData

__all__ = ["read"]

_SPLITS: Final = SPLITS | {"": ""}


def read(root: Path, table: Path) -> Catalog:
    """Return a row for each line of the table whose image is there.

    Args:
        root: Where the paths start.
        table: The file.

    Raises:
        BadData: The table does not hold, or none of its images is there.
    """
    lines = read_lines(table, needed=(("path", "image"), ("label",)))
    found, numbers = list[Row](), dict[str, int]()
    extra = {
        name: column_reader([cells[name] for _, cells in lines])
        for name in (lines[0][1] if lines else ())
        if name.lower() not in {"path", "image", "label", "split", "key"}
    }
    for number, cells in lines:
        named = {name.lower(): cell for name, cell in cells.items()}
        path, given = named.get("path", named.get("image", "")), named.get("split", "")
        image = os.path.normpath(os.path.join(root, path))
        if not path or "\0" in path or not image.startswith(os.path.join(root, "")):
            raise BadData(f"line {number} of {table} names the image {path!r}, which is not below {root}")
        if given.lower() not in _SPLITS:
            raise BadData(
                f"line {number} of {table} has the split {given!r}; give train, test, query, gallery or none"
            )
        key = named.get("key", path_text(PurePosixPath(os.path.relpath(image, root))))
        if not key or numbers.setdefault(key, number) != number:
            told = f"the key {key!r} again, as on line {numbers[key]}" if key else "an empty key"
            raise BadData(f"line {number} of {table} has {told}; each row needs its own key")
        metadata = {name: kind(cells[name]) for name, kind in extra.items() if cells[name]}
        found.append(Row(key, File(Path(image)), named["label"], _SPLITS[given.lower()], metadata))
    there = which_are_files(root, [os.path.relpath(row.image.path, root) for row in found])
    rows = [row for row, is_there in zip(found, there, strict=True) if is_there]
    absent = [row for row, is_there in zip(found, there, strict=True) if not is_there]
    if not rows:
        paths = [os.path.relpath(row.image.path, root) for row in absent[:3]]
        told = f"none of its {len(absent)} images is there: {paths}" if absent else "it has no rows"
        raise BadData(f"the table {table} gives no image below {root}: {told}")
    return make_catalog(root, "csv", rows, absent=absent, table=table)
