"""Tiles of a gallery's map as they travel."""

from protos import gallery_service_pb2 as pb
from serving.gallery.place import AnyGallery
from serving.gallery.search.tile import MAX_ZOOM, map_tile
from serving.rpc.status import refusal

__all__ = ["tile_reply"]


def tile_reply(gallery: AnyGallery, request: pb.GetMapTileRequest) -> pb.GetMapTileResponse:
    """Read the tile that was asked for; Refusal where there is none of that place."""
    if request.zoom > MAX_ZOOM:
        raise refusal("zoom", f"{request.zoom} was asked for; a map can be halved {MAX_ZOOM} times.")
    for name in ("column", "row"):
        if (place := getattr(request, name)) >> request.zoom:
            most = (1 << request.zoom) - 1
            raise refusal(name, f"{place} was asked for; at zoom {request.zoom} they go from 0 to {most}.")
    with gallery.reading() as (snapshot, reader):
        tile = map_tile(snapshot, reader, request.zoom, request.column, request.row, request.field)
    return pb.GetMapTileResponse(
        points=tile.points.astype("<f4").tobytes(),
        keys=tile.keys,
        values=tile.values,
        value_of=tile.value_of.astype("<u2").tobytes(),
        items=tile.items,
    )
