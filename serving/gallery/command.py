"""The command `crossbatch gallery`: look at the galleries of a folder, rebuild one's index, drop one."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import BadSetting, CrossbatchError, NotFound
from serving.gallery.directory import GalleryDirectory
from serving.gallery.gallery import RebuildPolicy

__all__ = ["Settings", "render", "run"]

_log = logging.getLogger(__name__)


class Settings(BaseModel):
    """Settings of `crossbatch gallery`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["list", "info", "rebuild", "drop"] = Field(
        description="list them all, show one, make its search index anew, or remove it",
        json_schema_extra={"positional": True},
    )
    name: str | None = Field(
        default=None,
        description="the gallery's name; list needs none",
        json_schema_extra={"positional": True},
    )
    galleries: Path = Field(default=Path("galleries"), description="the folder that holds the galleries")
    yes: bool = Field(default=False, description="drop without being asked")


def run(settings: Settings) -> dict[str, Any]:
    """Do what the command says.

    Returns:
        `{"galleries": [...]}`: one entry a gallery, with its `error` where it cannot be opened; for `drop`
        `{"dropped": name}`.

    Raises:
        BadSetting: The name or `--yes` is missing, or a name too many.
        NotFound: There is no such folder or gallery.
        CrossbatchError: The gallery is damaged, or its folder cannot be written.
    """
    if (settings.name is None) != (settings.action == "list"):
        wanted = "takes no name" if settings.action == "list" else "needs the name of a gallery"
        raise BadSetting(f"crossbatch gallery {settings.action} {wanted}; see crossbatch gallery --help")
    if not settings.galleries.is_dir():
        raise NotFound(
            f"there is no folder {settings.galleries}; give the folder of galleries by --galleries"
        )
    # A command looks and goes: it leaves background work to the server.
    with GalleryDirectory(settings.galleries, policy=RebuildPolicy(automatic=False)) as directory:
        if settings.name is None:
            return {"galleries": [_entry(directory, name) for name in directory.names()]}
        if settings.action == "drop":
            return _drop(directory, settings.name, yes=settings.yes)
        gallery = directory.get(settings.name)
        if settings.action == "info":
            return {"galleries": [dataclasses.asdict(gallery.info())]}
        began = time.monotonic()
        gallery.rebuild()
        seconds = round(time.monotonic() - began, 3)
        return {"galleries": [dataclasses.asdict(gallery.info())], "seconds": seconds}


def render(result: dict[str, Any]) -> str:
    """Return what a person reads."""
    if "dropped" in result:
        return f"dropped the gallery {result['dropped']}"
    if not result["galleries"]:
        return "no gallery"
    lines = [_line(entry) for entry in result["galleries"]]
    if "seconds" in result:
        lines.append(f"index rebuilt in {result['seconds']:.1f} s")
    return "\n".join(lines)


def _drop(directory: GalleryDirectory, name: str, *, yes: bool) -> dict[str, Any]:
    if not yes:
        items = _entry(directory, name).get("items", "an unknown number of")
        raise BadSetting(f"dropping the gallery {name} removes {items} items for good; add --yes to do it")
    directory.drop(name)
    return {"dropped": name}


def _entry(directory: GalleryDirectory, name: str) -> dict[str, Any]:
    try:
        return dataclasses.asdict(directory.get(name).info())
    except NotFound:
        raise
    except CrossbatchError as error:  # it hides no other gallery
        return {"name": name, "error": str(error)}
    except Exception as error:  # nor does a bug that one gallery shows
        _log.exception("the gallery %s cannot be described", name)
        return {"name": name, "error": f"it cannot be described: {type(error).__name__} {error}"}


def _line(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f"{entry['name']}: {entry['error']}"
    return (
        f"{entry['name']}: {entry['items']} items of dimension {entry['dimension']}, "
        f"model {entry['model_name']} ({entry['fingerprint'][:12]}); {entry['index_type']} index over "
        f"{entry['index_items']}, {entry['fresh']} newer, {entry['deleted']} deleted; "
        f"{(entry['index_bytes'] + entry['store_bytes']) / 1e6:.1f} MB; created {entry['created']}"
    )
