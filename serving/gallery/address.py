"""Where galleries lie, as a setting tells it: in a folder or in a Milvus. It loads no engine."""

import re
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from serving.errors import BadSetting

__all__ = ["TOKEN", "Place", "milvus_address", "placed"]

TOKEN = "CROSSBATCH_MILVUS_TOKEN"  # noqa: S105 - the name of the variable
_ADDRESS = re.compile(r"(milvuss?://[\w.-]+)(?::(\d{1,5}))?(/\w+)?/*")
_MEANT = re.compile(r"\w+:/|milvuss?(:|//)", re.IGNORECASE)  # no folder that anybody has


def milvus_address(given: str) -> str:
    """Return the address of a Milvus with its port, as milvus://HOST:PORT[/DATABASE]; BadSetting."""
    found = _ADDRESS.fullmatch(given)
    if found and 0 < (port := int(found[2] or 19530)) < 65_536:
        return f"{found[1]}:{port}{found[3] or ''}"
    if "@" in given:
        raise BadSetting(
            "the address of the Milvus has a password in it, which others could read; put USER:PASSWORD "
            f"into the environment variable {TOKEN}"
        )
    raise BadSetting(
        f"{given.rstrip('/')!r:.200} is no place of galleries: give a folder, or a Milvus as "
        "milvus://HOST:19530 (a gallery in it is milvus://HOST:19530/NAME, where one is asked for)"
    )


def _place(given: Any) -> Any:
    """Return a folder as a path and an address of Milvus as text, whatever else as it is."""
    if not isinstance(given, str):
        return given
    return milvus_address(given) if _MEANT.match(given) else Path(given)


Place: TypeAlias = Annotated[Path | str, BeforeValidator(_place)]
"""A folder of galleries or, as text, a Milvus: `milvus://HOST:PORT[/DATABASE]`, with TLS `milvuss://`."""


def placed(gallery: str, galleries: Path | str) -> tuple[Path | str, str]:
    """Return the place and the name of a gallery: one of those `galleries`, or of the place before its /."""
    if "/" not in gallery:
        return galleries, gallery
    if not _MEANT.match(gallery):
        return Path(gallery).parent, Path(gallery).name
    place, _, name = gallery.rpartition("/")
    if place.endswith(":/") or not name:
        raise BadSetting(f"{gallery} names a Milvus and no gallery in it; give milvus://HOST:19530/NAME")
    return _place(place), name
