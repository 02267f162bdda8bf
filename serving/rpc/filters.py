"""How filters travel: the dataclasses of `serving.gallery.search.filter` as the message Filter, and back."""

from collections.abc import Iterable
from typing import Any

from protos import retrieval_service_pb2 as pb
from serving.errors import InvalidArgument
from serving.gallery.item import plain
from serving.gallery.search.filter import AllOf, AnyOf, Equal, Exists, Filter, In, Not, Range, check_filter

__all__ = ["MAX_FILTER_MESSAGE", "filter_message", "filter_of", "value_message"]

MAX_FILTER_MESSAGE = 524_288
"""Most bytes of a filter as it travels: its 64 KiB of text, and 1,000 conditions 30 levels deep."""

_BOUNDS = ("above", "least", "below", "most")


def filter_message(condition: Filter) -> pb.Filter:
    """Write a filter as it travels, its whole numbers as doubles; InvalidArgument where it cannot be sent."""
    try:
        return _written(check_filter(condition))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"The filter holds a text that is not Unicode: {error.reason}.") from error
    except TypeError as error:
        raise InvalidArgument(f"The filter holds no list where it should: {error}.") from error


def filter_of(message: pb.Filter) -> Filter:
    """Read a filter; InvalidArgument where it is incomplete, too large, or cannot be carried out."""
    if (size := message.ByteSize()) > MAX_FILTER_MESSAGE:
        raise InvalidArgument(
            f"The filter takes {size:,} bytes; one of 1,000 conditions with 64 KiB of text takes less than "
            f"{MAX_FILTER_MESSAGE:,}. Use fewer or shorter conditions."
        )
    return check_filter(_read(message))


def _written(condition: Filter) -> pb.Filter:
    match condition:
        case Equal(field, value):
            return pb.Filter(equal=pb.Filter.Equal(field=field, value=value_message(value)))
        case In(field, values):
            sent = [value_message(value) for value in values]
            return pb.Filter(among=pb.Filter.Among(field=field, values=sent))
        case Range(field):
            given = {name: getattr(condition, name) for name in _BOUNDS}
            bounds = {name: value_message(bound) for name, bound in given.items() if bound is not None}
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


def value_message(given: object) -> pb.Filter.Value:
    """Write a value as it travels, a whole number as a double."""
    value = plain(given)
    if isinstance(value, str):
        return pb.Filter.Value(string=value)
    if isinstance(value, bool):
        return pb.Filter.Value(boolean=value)
    return pb.Filter.Value(number=float(value))


def _read(message: pb.Filter) -> Filter:
    match message.WhichOneof("condition"):
        case "equal":
            return Equal(message.equal.field, _value(message.equal.value))
        case "among":
            return In(message.among.field, tuple(_value(each) for each in message.among.values))
        case "range":
            given = message.range
            return Range(
                given.field,
                **{name: _value(getattr(given, name)) for name in _BOUNDS if given.HasField(name)},
            )
        case "exists":
            return Exists(message.exists)
        case "all_of":
            return AllOf(tuple(_read(each) for each in message.all_of.filters))
        case "any_of":
            return AnyOf(tuple(_read(each) for each in message.any_of.filters))
        case "negated":
            return Not(_read(message.negated))
        case _:
            raise InvalidArgument(
                "A filter is empty; give equal, among, range, exists, all_of, any_of or negated."
            )


def _value(message: pb.Filter.Value) -> Any:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("A filter lacks a value; give a string, a number or a boolean.")
    return getattr(message, kind)
