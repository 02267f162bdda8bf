"""How a gallery's name stands in Milvus, whose names have no '.' and no '-': as an alias."""

import re

__all__ = ["COLLECTION", "alias_of", "name_of"]

COLLECTION = "crossbatch_collection_"
"""How the names of collections begin that hold a gallery; its id follows."""
_ALIAS = "crossbatch_gallery_"
_WRITTEN = {"_": "__", ".": "_d", "-": "_h"}
_READ = {written: letter for letter, written in _WRITTEN.items()}


def alias_of(name: str) -> str:
    """Return the alias for the name of a gallery."""
    return _ALIAS + "".join(_WRITTEN.get(letter, letter) for letter in name)


def name_of(alias: str) -> str:
    """Return the name of the gallery that an alias is for; empty where it is for none."""
    name = re.sub("_.", lambda found: _READ.get(found[0], found[0]), alias.removeprefix(_ALIAS))
    return name if alias_of(name) == alias else ""
