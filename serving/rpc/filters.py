"""How filters travel: the dataclasses of `serving.gallery.search.filter` as the message Filter, and back."""

from collections.abc import Iterable

from protos import retrieval_service_pb2 as pb
from serving.errors import InvalidArgument
from serving.gallery.search.filter import (
    AllOf,
    AnyOf,
    Equal,
    Exists,
    Filter,
    In,
    Not,
    Range,
    Value,
    check_filter,
)
from serving.rpc.limits import MAX_FILTER_CONDITIONS

__all__ = ["filter_message", "filter_of"]

_BOUNDS = ("above", "least", "below", "most")


def filter_message(condition: Filter) -> pb.Filter:
    """Write a filter as it travels; its whole numbers become doubles.

    Raises:
        InvalidArgument: if it is no filter, too large, or holds a value that cannot be sent.
    """
    try:
        return _written(check_filter(condition))
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"The filter holds a text that is not valid Unicode: {error.reason}."
        ) from error
    except TypeError as error:
        raise InvalidArgument(f"The filter holds no list where it should: {error}.") from error


def filter_of(message: pb.Filter) -> Filter:
    """Read a filter.

    Raises:
        InvalidArgument: if it is incomplete, too large, or cannot be carried out.
    """
    return check_filter(_read(message, _Room()))


class _Room:
    """Counts conditions as `check_filter` does, so that a huge filter is refused before it is unpacked."""

    def __init__(self) -> None:
        self._left = MAX_FILTER_CONDITIONS

    def take(self, conditions: int) -> None:
        self._left -= conditions
        if self._left < 0:
            raise InvalidArgument(
                f"The filter has more than {MAX_FILTER_CONDITIONS:,} conditions and values; use fewer."
            )


def _written(condition: Filter) -> pb.Filter:
    match condition:
        case Equal(field, value):
            return pb.Filter(equal=pb.Filter.Equal(field=field, value=_value_message(value)))
        case In(field, values):
            sent = [_value_message(value) for value in values]
            return pb.Filter(among=pb.Filter.Among(field=field, values=sent))
        case Range(field):
            bounds = {
                name: _value_message(bound)
                for name in _BOUNDS
                if (bound := getattr(condition, name)) is not None
            }
            return pb.Filter(range=pb.Filter.Range(field=field, **bounds))
        case Exists(field):
            return pb.Filter(exists=field)
        case AllOf(filters):
            return pb.Filter(all_of=_several(filters))
        case AnyOf(filters):
            return pb.Filter(any_of=_several(filters))
        case Not(inner):
            return pb.Filter(negated=_written(inner))


def _several(filters: Iterable[Filter]) -> pb.Filter.Several:
    return pb.Filter.Several(filters=[_written(each) for each in filters])


def _value_message(value: Value) -> pb.Filter.Value:
    if isinstance(value, str):
        return pb.Filter.Value(string=value)
    if isinstance(value, bool):
        return pb.Filter.Value(boolean=value)
    return pb.Filter.Value(number=float(value))


def _read(message: pb.Filter, room: _Room) -> Filter:
    match message.WhichOneof("condition"):
        case "equal":
            room.take(1)
            return Equal(message.equal.field, _value(message.equal.value))
        case "among":
            room.take(max(1, len(message.among.values)))
            return In(message.among.field, tuple(_value(each) for each in message.among.values))
        case "range":
            room.take(1)
            bounds = {
                name: _value(getattr(message.range, name)) for name in _BOUNDS if message.range.HasField(name)
            }
            return Range(message.range.field, **bounds)
        case "exists":
            room.take(1)
            return Exists(message.exists)
        case "all_of":
            return AllOf(_read_several(message.all_of, room))
        case "any_of":
            return AnyOf(_read_several(message.any_of, room))
        case "negated":
            return Not(_read(message.negated, room))
        case _:
            raise InvalidArgument(
                "A filter is empty; give equal, among, range, exists, all_of, any_of or negated."
            )


def _read_several(message: pb.Filter.Several, room: _Room) -> tuple[Filter, ...]:
    if not message.filters:
        room.take(1)
    return tuple(_read(each, room) for each in message.filters)


def _value(message: pb.Filter.Value) -> Value:
    match message.WhichOneof("kind"):
        case "string":
            return message.string
        case "number":
            return message.number
        case "boolean":
            return message.boolean
        case _:
            raise InvalidArgument("A filter lacks a value; give a string, a number or a boolean.")
