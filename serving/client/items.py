"""Items of a gallery: written in calls made again only where that does no harm, read page by page."""

from collections.abc import Iterable, Iterator

from protos import gallery_service_pb2 as pb
from serving.client.answers import Item, StoredItem, item_message, stored_item_of
from serving.client.attempts import faults_of
from serving.client.given import at_hand, check_version, many, text, texts
from serving.client.splitting import Piece, answered_in_turn, chunks_of, moved_field, pieces_of
from serving.client.step import Call, Give, Plan, Take
from serving.errors import CrossbatchError, InvalidArgument
from serving.rpc.limits import MAX_DELETED_KEYS, MAX_INPUTS, MAX_PAGE

__all__ = ["delete_items", "get_item", "list_items", "upsert_items"]


def upsert_items(gallery: str, items: Iterable[Item]) -> Plan[list[int]]:
    """Store items in as many calls as the limits demand.

    A call with a condition is not made again once it may have been carried out: it would find its own write
    and report a conflict.

    Args:
        gallery: Where to store them.
        items: What to store.

    Returns:
        The new version of each, in order.

    Raises:
        CrossbatchError: of the first call that failed, with `stored` set; a field is named by its place among
            all items.
    """
    name, versions = text(gallery, "gallery"), list[int]()
    messages = (item_message(item) for item in many(items, "items"))

    def store(piece: Piece[pb.Item]) -> Plan[list[int]]:
        request = pb.UpsertItemsRequest(gallery=name, items=piece.inputs)
        conditional = any(each.HasField("expected_version") for each in piece.inputs)
        try:
            return list((yield Call(request, idempotent=not conditional)).versions)
        except CrossbatchError as error:
            faults = faults_of(error)
            if not faults:
                raise
            field = moved_field(faults[0].field, piece.place)
            raise error.saying(f"{field}: {faults[0].error}") from error

    pieces = pieces_of(messages, pb.Item.ByteSize, MAX_INPUTS)
    try:
        yield from answered_in_turn(
            pieces, store, versions, waits=not at_hand(items), identity=lambda item: item.key
        )
    except CrossbatchError as error:
        error.stored = len(versions)
        raise
    return versions


def delete_items(gallery: str, keys: Iterable[str], versions: Iterable[int] | None) -> Plan[int]:
    """Remove items in as many calls as the limits demand; conditions as in `upsert_items`.

    Args:
        gallery: Where they are.
        keys: Whose items go.
        versions: The version that each must have now, if it matters.

    Returns:
        How many were there and are gone.

    Raises:
        CrossbatchError: of the call that failed.
    """
    name, deleted = text(gallery, "gallery"), 0
    chunks = chunks_of(_expectations(keys, versions), _size_of, MAX_DELETED_KEYS)
    while True:
        chunk = yield Take(chunks, not isinstance(keys, list | tuple))
        if chunk is None:
            return deleted
        request = pb.DeleteItemsRequest(
            gallery=name,
            keys=[key for key, _ in chunk],
            expected_versions=[version for _, version in chunk if version is not None],
        )
        deleted += (yield Call(request, idempotent=versions is None)).deleted


def get_item(gallery: str, key: str, *, thumbnail: bool) -> Plan[StoredItem]:
    """Read one item.

    Raises:
        CrossbatchError: if the call fails.
    """
    request = pb.GetItemRequest(
        gallery=text(gallery, "gallery"), key=text(key, "key"), with_thumbnail=bool(thumbnail)
    )
    reply = yield Call(request)
    return stored_item_of(reply.item, reply.thumbnail)


def list_items(gallery: str, *, prefix: str, vectors: bool) -> Plan[None]:
    """Give all items in the order of their keys, each page asked for when its turn comes.

    Raises:
        InvalidArgument: at once, if an argument is of another kind.
        CrossbatchError: if a call fails.
    """
    request = pb.ListItemsRequest(
        gallery=text(gallery, "gallery"),
        key_prefix=text(prefix, "prefix"),
        with_vectors=bool(vectors),
        page_size=MAX_PAGE,
    )
    return _pages(request)


def _pages(request: pb.ListItemsRequest) -> Plan[None]:
    while True:
        reply = yield Call(request)
        for item in reply.items:
            yield Give(stored_item_of(item))
        if not reply.next_page_token:
            return
        request.page_token = reply.next_page_token


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
