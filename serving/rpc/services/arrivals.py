"""The items of an upsert as they arrive: unpacked and checked one after the other, all or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from protos import gallery_service_pb2 as pb
from serving.engine.pipeline import check_size
from serving.engine.workers import check_time
from serving.errors import CrossbatchError, InvalidArgument
from serving.gallery.item import Item, check_item
from serving.rpc.loose import loosened
from serving.rpc.parts import LARGE, check_parts, fields_of
from serving.rpc.status import Refusal, Violation
from serving.rpc.wire import metadata_of, vector_of

__all__ = ["Arrivals", "UnreadItems", "made_of", "read_items"]

T = TypeVar("T")

MAX_METADATA_MESSAGE = 1_048_576
"""Most bytes of an item's metadata as it travels: 64 KiB of JSON never take as many."""

_METADATA = pb.Item.DESCRIPTOR.fields_by_name["metadata"].number

UnreadItems = loosened(pb.UpsertItemsRequest)
"""An UpsertItemsRequest whose `items` are bytes."""


@dataclass(slots=True)
class Arrivals:
    """The items of one upsert."""

    items: list[Item] = field(default_factory=list)
    """Those that come as images have a vector that only stands in."""
    images: dict[int, bytes] = field(default_factory=dict)
    """The images, by the position of their items."""
    expected: dict[str, int] = field(default_factory=dict)
    """By key, the version that an item must have now; 0: there must be none."""


def read_items(parts: Sequence[bytes], dimension: int, deadline: float | None) -> Arrivals:
    """Unpack and check items, one after the other, each once; everything that needs no model.

    Args:
        parts: Messages of the type Item.
        dimension: Of the vectors.
        deadline: The `time.monotonic()` until which somebody waits.

    Returns:
        What they hold.

    Raises:
        Refusal: if some are bad; names the field of each.
        DeadlineExceeded: if there was no time to look at all.
    """
    read = Arrivals()
    violations: list[Violation] = []
    first: dict[str, int] = {}
    # `check_item` looks at the whole item.
    unit = np.eye(1, dimension, dtype=np.float32)[0]
    for i, part in enumerate(parts):
        check_time(deadline, "all items were checked")
        place = f"items[{i}]"
        try:
            message = _item_message(part)
            if (earlier := first.setdefault(message.key, i)) != i:
                same = f"The key {message.key!r} is also that of items[{earlier}]; send each key once."
                violations.append(Violation(f"{place}.key", InvalidArgument(same)))
            item = Item(message.key, unit, message.label, message.uri, metadata_of(message.metadata))
            check_item(item, dimension=dimension)
            match message.WhichOneof("content"):
                case "image":
                    place = f"{place}.image"
                    check_size(message.image)
                    read.images[i] = message.image
                case "vector":
                    place = f"{place}.vector"
                    item = replace(item, vector=vector_of(message.vector))
                    check_item(replace(item, metadata={}), dimension=dimension)  # its metadata has been
                case _:
                    raise InvalidArgument("The item is empty; give an image or a vector.")
            read.items.append(item)
            if message.HasField("expected_version"):
                read.expected[message.key] = message.expected_version
        except CrossbatchError as error:
            violations.append(Violation(place, error))
    if violations:
        raise Refusal(violations)
    return read


def made_of(outcomes: Mapping[int, T | Exception]) -> dict[int, T]:
    """Return what was made of each image of an upsert.

    Args:
        outcomes: By position, what was made or why nothing was.

    Raises:
        Refusal: if some are no images; names the field of each.
        Exception: another failure, which is not the fault of a field.
    """
    made: dict[int, T] = {}
    violations: list[Violation] = []
    for i, outcome in outcomes.items():
        if isinstance(outcome, InvalidArgument):
            violations.append(Violation(f"items[{i}].image", outcome))
        elif isinstance(outcome, Exception):  # overload, lateness or a bug
            raise outcome
        else:
            made[i] = outcome
    if violations:
        raise Refusal(violations)
    return made


def _item_message(part: bytes) -> pb.Item:
    try:
        if len(part) > LARGE:
            check_parts(part)
            size = sum(
                len(whole) for number, _, _, whole in fields_of(memoryview(part)) if number == _METADATA
            )
            if size > MAX_METADATA_MESSAGE:
                raise InvalidArgument(
                    f"The metadata takes {size:,} bytes; what is at most 64 KiB as JSON takes less than "
                    f"{MAX_METADATA_MESSAGE:,}. Store less with the item."
                )
        return pb.Item.FromString(part)
    except (DecodeError, ValueError) as error:
        raise InvalidArgument(
            "The bytes are no Item, or its metadata is nested too deep; check the proto files."
        ) from error
