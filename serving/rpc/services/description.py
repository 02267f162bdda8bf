"""Galleries as they are described to callers, those with a problem too."""

from typing import TYPE_CHECKING

from protos import gallery_service_pb2 as pb
from serving.engine.fleet import Fleet
from serving.engine.shelf import Shelf
from serving.errors import Mismatch
from serving.rpc.status import to_status

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.gallery.gallery import Gallery

__all__ = ["described"]


def described(shelf: Shelf, fleet: Fleet, name: str) -> pb.Gallery:
    """Describe a gallery, also one that is damaged or of a model that is not served; blocks.

    Raises:
        NotFound: if there is none of that name.
    """
    told = pb.Gallery(name=name)

    def describe(gallery: "Gallery") -> None:
        info = gallery.info()
        told.model_name = info.model_name
        told.model_fingerprint = info.fingerprint
        told.dimension = info.dimension
        told.items = info.items
        told.index_type = info.index_type
        told.recall = info.recall
        told.fresh_items = info.fresh
        told.deleted_items = info.deleted
        told.generation = info.generation
        told.thumbnail_side = gallery.meta.thumbnail_side
        fleet.fitting(gallery)

    try:
        shelf.galleries.using(name, describe)
    except Mismatch as error:
        told.problem.CopyFrom(to_status(shelf.hide(error)))
    return told
