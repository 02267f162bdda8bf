"""What metadata an item may have: a JSON object of bounded size and depth."""

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from serving.errors import InvalidArgument

__all__ = ["MAX_METADATA_BYTES", "MAX_METADATA_LEVELS", "check_metadata", "metadata_json", "metadata_text"]

MAX_METADATA_BYTES = 65_536
MAX_METADATA_LEVELS = 30  # Protocol Buffers read 100 levels of messages; one of metadata takes up to three
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check that metadata can travel: a mapping of few levels, whose numbers are within those of a double.

    Raises:
        InvalidArgument: It cannot.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a JSON object, found {type(metadata).__name__}")
    _check_value(metadata, MAX_METADATA_LEVELS)


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Write metadata as the JSON object that is stored.

    Raises:
        InvalidArgument: It is not a JSON object, holds a number larger than a double, is nested more than 30
            levels deep, or is larger than 64 KiB.
    """
    check_metadata(metadata)
    if not all(isinstance(name, str) for name in metadata):
        raise InvalidArgument("metadata must be a JSON object: every name in it must be a string")
    try:
        text = metadata_text(metadata)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata cannot be written as JSON: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(f"metadata is {size} bytes of JSON; the limit is {MAX_METADATA_BYTES}")
    return text


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Write metadata that `metadata_json` has accepted."""
    return _JSON.encode(dict(metadata))


def _check_value(value: Any, left: int) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise InvalidArgument("metadata holds a whole number larger than a double; write it as a string")
        return
    if not left:
        raise InvalidArgument(f"metadata is nested more than {MAX_METADATA_LEVELS} levels deep")
    for each in inner:
        _check_value(each, left - 1)
