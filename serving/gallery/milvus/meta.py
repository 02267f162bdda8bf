"""What a gallery is made for, in the properties of its collection."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from serving.errors import BadArtifact
from serving.gallery.milvus.server import Collection
from serving.gallery.store.schema import Meta

__all__ = ["FORMAT", "meta_of", "previous_of", "properties_of", "with_previous"]

FORMAT = 1
_BEFORE = "crossbatch."
_NAME, _COLLECTION = f"{_BEFORE}previous_name", f"{_BEFORE}previous_collection"


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
