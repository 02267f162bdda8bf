"""Whole galleries: made, described, indexed anew, exchanged and removed."""

from protos import gallery_service_pb2 as pb
from serving.client.answers import GalleryInfo, gallery_info_of, progress_of
from serving.client.given import check_number, check_whole, text
from serving.client.step import Call, Give, Open, Plan, Receive
from serving.gallery.store.schema import MAX_THUMBNAIL_SIDE

__all__ = [
    "build_index",
    "create_gallery",
    "delete_gallery",
    "get_gallery",
    "list_galleries",
    "rollback_gallery",
    "switch_gallery",
]


def create_gallery(
    gallery: str, *, thumbnail_side: int, index: str, recall: float | None, model: str
) -> Plan[GalleryInfo]:
    """Make an empty gallery.

    Raises:
        CrossbatchError: if an argument makes no sense or the call fails.
    """
    request = pb.CreateGalleryRequest(
        name=text(gallery, "gallery"),
        thumbnail_side=check_whole(thumbnail_side, "thumbnail_side", most=MAX_THUMBNAIL_SIDE),
        index=text(index, "index"),
        recall=None if recall is None else check_number(recall, "recall", least=0),
        model=text(model, "model"),
    )
    # Made again after a lost reply, it would find its own gallery and say that the name is taken.
    reply = yield Call(request, idempotent=False)
    return gallery_info_of(reply.gallery)


def get_gallery(name: str) -> Plan[GalleryInfo]:
    """Describe one gallery.

    Raises:
        CrossbatchError: if the call fails.
    """
    reply = yield Call(pb.GetGalleryRequest(name=text(name, "name")))
    return gallery_info_of(reply.gallery)


def list_galleries() -> Plan[list[GalleryInfo]]:
    """Describe all galleries, in the order of their names.

    Raises:
        CrossbatchError: if a call fails.
    """
    request, found = pb.ListGalleriesRequest(), list[GalleryInfo]()
    while True:
        reply = yield Call(request)
        found += map(gallery_info_of, reply.galleries)
        if not reply.next_page_token:
            return found
        request.page_token = reply.next_page_token


def delete_gallery(gallery: str) -> Plan[None]:
    """Remove a gallery with everything in it.

    Raises:
        CrossbatchError: if the call fails.
    """
    # Made again after a lost reply, it could meet a new gallery of that name, made by somebody else.
    yield Call(pb.DeleteGalleryRequest(name=text(gallery, "gallery")), idempotent=False)


def switch_gallery(gallery: str, other: str) -> Plan[GalleryInfo]:
    """Give the name of one gallery to another one.

    Raises:
        CrossbatchError: if the call fails.
    """
    request = pb.SwitchGalleryRequest(name=text(gallery, "gallery"), other=text(other, "other"))
    # Made again after a lost reply, either of these two could undo itself.
    reply = yield Call(request, idempotent=False)
    return gallery_info_of(reply.gallery)


def rollback_gallery(gallery: str) -> Plan[GalleryInfo]:
    """Undo the switch by which a gallery got its name.

    Raises:
        CrossbatchError: if the call fails.
    """
    reply = yield Call(pb.RollbackGalleryRequest(name=text(gallery, "gallery")), idempotent=False)
    return gallery_info_of(reply.gallery)


def build_index(gallery: str, *, index: str, recall: float | None, timeout: float) -> Plan[None]:
    """Make a search index anew and give how far that is; the last one has the gallery.

    Raises:
        InvalidArgument: at once, if an argument makes no sense.
        CrossbatchError: if the call fails.
    """
    request = pb.BuildIndexRequest(
        name=text(gallery, "gallery"),
        index=text(index, "index"),
        recall=None if recall is None else check_number(recall, "recall", least=0),
    )
    return _progress(Call(request, timeout=check_number(timeout, "timeout", least=0, most=86_400)))


def _progress(call: Call) -> Plan[None]:
    stream = yield Open(call)
    while (reply := (yield Receive(stream))) is not None:
        yield Give(progress_of(reply))
