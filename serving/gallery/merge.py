"""What becomes of an item's label, URI and metadata when its source and clients both have changed them.

Field by field, the label, the URI and each top-level field of the metadata being one: what the source has
changed since it gave it counts, and all else stays as clients left it. Where it merely writes the same
otherwise, 10 as 10.0 or "10" since another row of its column is of that type, a client's edit stays.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from serving.gallery.item import GalleryItem, given_by_source

__all__ = ["merge", "same_given"]

_Fields = Mapping[tuple[bool, str], Any]  # by whether they are of the metadata, and their names


def merge(told: GalleryItem, stored: GalleryItem) -> tuple[GalleryItem, tuple[str, ...]]:
    """Return an item as its source tells it now, but for what clients alone changed of the one stored.

    Its source remembers what it gave. Beside it are the fields that a client had changed and the source then
    changed otherwise, each with what the client had put there: they are as the source has them.
    """
    given = given_by_source(told)
    new, before = _fields(given), _fields(given_by_source(stored))
    held = _fields(given_by_source(replace(stored, source=None)))
    merged, conflicts = {**held}, list[str]()
    for name in {**before, **new}:
        if _exact(new, name) != _exact(before, name):
            if _about(held, name) not in (_about(before, name), _about(new, name)):
                if _told(new, name) == _told(before, name):
                    continue
                lost = json.dumps(held[name], ensure_ascii=False) if name in held else "removed"
                conflicts.append(f"{name[1]} was {lost:.80}")
            merged.pop(name, None)
            merged |= {name: new[name]} if name in new else {}
    label, uri = merged.pop((False, "label")), merged.pop((False, "uri"))
    metadata = {name: value for (_, name), value in merged.items()}
    item = replace(told, label=label, uri=uri, metadata=metadata, source=None)
    remembered = "" if same_given(given_by_source(item), given) else given
    return replace(item, source=told.source and replace(told.source, given=remembered)), tuple(conflicts)


def same_given(one: str, other: str) -> bool:
    """Compare what two sources gave: 1, 1.0 and true are not the same; the order of fields says nothing."""
    return one == other or _sorted(json.loads(one)) == _sorted(json.loads(other))


def _fields(given: str) -> _Fields:
    label, uri, metadata = json.loads(given)
    texts = {(False, "label"): label, (False, "uri"): uri}
    return texts | {(True, name): value for name, value in metadata.items()}


def _exact(fields: _Fields, name: tuple[bool, str]) -> str:
    """Write a field, or that it is not there."""
    return _sorted([fields[name]] if name in fields else [])


def _about(fields: _Fields, name: tuple[bool, str]) -> str:
    """Write it as it comes back from a client, to whom 2.0 is 2."""
    return _sorted(json.loads(_exact(fields, name), parse_float=_number))


def _told(fields: _Fields, name: tuple[bool, str]) -> str:
    """Write it as a table might have it, whatever its type is."""
    value = fields.get(name)
    if isinstance(value, list | dict):
        return _sorted(value)
    text = str(value).lower()
    try:
        return str(float(text))
    except ValueError:
        return text


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _sorted(value: object) -> str:
    return json.dumps(value, sort_keys=True)
