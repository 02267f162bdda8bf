"""How Milvus has a gallery: its name as an alias, and what it is made for in its collection's properties."""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from serving.errors import BadArtifact
from serving.gallery.milvus.server import Collection
from serving.gallery.store.schema import Meta

__all__ = [
    "COLLECTION", "FORMAT", "alias_of", "meta_of", "name_of", "previous_of", "properties_of", "with_previous",
]  # fmt: skip

COLLECTION = "crossbatch_collection_"
"""How the names of collections begin that hold a gallery; its id follows."""
_ALIAS = "crossbatch_gallery_"
_WRITTEN = {"_": "__", ".": "_d", "-": "_h"}
_READ = {written: letter for letter, written in _WRITTEN.items()}
FORMAT = 1  # of what is in a collection
_BEFORE = "crossbatch."
_NAME, _COLLECTION = f"{_BEFORE}previous_name", f"{_BEFORE}previous_collection"


def alias_of(name: str) -> str:
    """Return the alias for the name of a gallery."""
    return _ALIAS + "".join(_WRITTEN.get(letter, letter) for letter in name)


def name_of(alias: str) -> str:
    """Return the name of the gallery that an alias is for; empty where it is for none."""
    name = re.sub("_.", lambda found: _READ.get(found[0], found[0]), alias.removeprefix(_ALIAS))
    return name if alias_of(name) == alias else ""


def properties_of(meta: Meta) -> dict[str, str]:
    """Return the properties of the collection of a new gallery."""
    told = {"format": FORMAT, **asdict(meta)}
    return {_BEFORE + name: str(value) for name, value in told.items()}


def meta_of(collection: Collection, name: str) -> Meta:
    """Return what a gallery is made for; BadArtifact: its collection is not ours, or of another format."""
    told = {key.removeprefix(_BEFORE): value for key, value in collection.properties.items()}
    format = told.get("format", "")
    if not format.isdecimal():
        raise BadArtifact(
            f"the collection {collection.name}, to which the name of the gallery {name} leads, was not "
            "made by crossbatch; give the gallery another name"
        )
    if int(format) != FORMAT:
        raise BadArtifact(
            f"the collection {collection.name} of the gallery {name} is of format {format}, and this "
            f"crossbatch reads {FORMAT}; upgrade crossbatch, or drop the gallery and index its images again"
        )
    try:
        values: dict[str, Any] = {
            field.name: int(told[field.name]) if field.type is int else told[field.name]
            for field in fields(Meta)
        }
    except (KeyError, ValueError) as error:
        raise BadArtifact(
            f"the properties of the collection {collection.name} of the gallery {name} were altered "
            f"({type(error).__name__} {error}); drop the gallery and index its images again"
        ) from error
    if values["dimension"] != collection.dimension:
        raise BadArtifact(
            f"the collection {collection.name} holds vectors of dimension {collection.dimension}, and the "
            f"gallery {name} is for {values['dimension']}; drop the gallery and index its images again"
        )
    return Meta(**values)


def with_previous(name: str, collection: str) -> dict[str, str]:
    """Return the properties that tell which collection had a name before, and which name it got instead."""
    return {_NAME: name, _COLLECTION: collection}


def previous_of(properties: Mapping[str, str]) -> tuple[str, str]:
    """Return that name and that collection, both empty where there is none."""
    return properties.get(_NAME, ""), properties.get(_COLLECTION, "")
