"""Writes of the Python client: checked, cut into calls, and made again only where that does no harm."""

from collections.abc import Iterable, Iterator
from typing import Any

from protos import gallery_service_pb2 as pb
from serving.errors import CrossbatchError, InvalidArgument
from serving.gallery.store.schema import MAX_THUMBNAIL_SIDE
from serving.rpc.asking.answers import Item, item_message
from serving.rpc.asking.caller import Caller, faults_of
from serving.rpc.asking.given import check_number, check_version, check_whole, many, text, texts
from serving.rpc.asking.splitting import chunks_of, moved_field
from serving.rpc.limits import MAX_DELETED_KEYS, MAX_INPUTS

__all__ = ["create_request", "delete_items", "upsert_items"]


def create_request(
    gallery: str, *, thumbnail_side: int, index: str, recall: float | None
) -> pb.CreateGalleryRequest:
    """Write what the new gallery is to be.

    Raises:
        InvalidArgument: if something is of another kind or out of range.
    """
    return pb.CreateGalleryRequest(
        name=text(gallery, "gallery"),
        thumbnail_side=check_whole(thumbnail_side, "thumbnail_side", most=MAX_THUMBNAIL_SIDE),
        index=text(index, "index"),
        recall=None if recall is None else check_number(recall, "recall", least=0),
    )


def upsert_items(caller: Caller, method: Any, gallery: str, items: Iterable[Item]) -> list[int]:
    """Store items in as many calls as the limits demand.

    A call with a condition is not made again once it may have been carried out: it would find its own write
    and report a conflict.

    Args:
        caller: Makes the calls.
        method: UpsertItems of a stub.
        gallery: Where to store them.
        items: What to store.

    Returns:
        The new version of each, in order.

    Raises:
        CrossbatchError: of the call that failed; a field is named by its place among all items.
    """
    name, versions = text(gallery, "gallery"), list[int]()
    messages = (item_message(item) for item in many(items, "items"))
    for chunk in chunks_of(messages, pb.Item.ByteSize, MAX_INPUTS):
        request = pb.UpsertItemsRequest(gallery=name, items=chunk)
        conditional = any(each.HasField("expected_version") for each in chunk)
        try:
            versions += caller.call(method, request, idempotent=not conditional).versions
        except CrossbatchError as error:
            faults = faults_of(error)
            if not faults:
                raise
            raise type(error)(f"{moved_field(faults[0].field, len(versions))}: {faults[0].error}") from error
    return versions


def delete_items(
    caller: Caller, method: Any, gallery: str, keys: Iterable[str], versions: Iterable[int] | None
) -> int:
    """Remove items in as many calls as the limits demand; conditions as in `upsert_items`.

    Args:
        caller: Makes the calls.
        method: DeleteItems of a stub.
        gallery: Where they are.
        keys: Whose items go.
        versions: The version that each must have now, if it matters.

    Returns:
        How many were there and are gone.

    Raises:
        CrossbatchError: of the call that failed.
    """
    name, deleted = text(gallery, "gallery"), 0
    for chunk in chunks_of(_expectations(keys, versions), _size_of, MAX_DELETED_KEYS):
        request = pb.DeleteItemsRequest(
            gallery=name,
            keys=[key for key, _ in chunk],
            expected_versions=[version for _, version in chunk if version is not None],
        )
        deleted += caller.call(method, request, idempotent=versions is None).deleted
    return deleted


def _expectations(keys: Iterable[str], versions: Iterable[int] | None) -> Iterator[tuple[str, int | None]]:
    """Each key with the version that its item must have, if it matters."""
    wanted = texts(keys, "keys")
    if versions is None:
        return ((key, None) for key in wanted)
    both = (
        list(wanted),
        [
            check_version(each, f"expected_versions[{i}]")
            for i, each in enumerate(many(versions, "expected_versions"))
        ],
    )
    if len(both[0]) != len(both[1]):
        raise InvalidArgument(
            f"There are {len(both[1])} expected_versions for {len(both[0])} keys; give one a key."
        )
    return iter(zip(*both, strict=True))


def _size_of(expectation: tuple[str, int | None]) -> int:
    return len(expectation[0].encode()) + 16
