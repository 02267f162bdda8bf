"""The command `crossbatch gallery`: look after the galleries of a folder."""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import BadSetting, CrossbatchError, NotFound
from serving.gallery.archive import restore, snapshot
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.index.policy import RebuildPolicy
from serving.gallery.listing import render
from serving.gallery.verify import verify
from serving.progress import stages

__all__ = ["Settings", "complaint", "render", "run"]

_PATIENCE = 60.0  # seconds that a switch waits for a rebuild
_WORDS = {
    "list": (),
    "info": ("NAME",),
    "verify": ("NAME",),
    "rebuild": ("NAME",),
    "snapshot": ("NAME", "FILE"),
    "restore": ("FILE", "NAME"),
    "switch": ("NAME", "OTHER"),
    "rollback": ("NAME",),
    "drop": ("NAME",),
}

_log = logging.getLogger(__name__)


class Settings(BaseModel):
    """Settings of `crossbatch gallery`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal[
        "list", "info", "verify", "rebuild", "snapshot", "restore", "switch", "rollback", "drop"
    ] = Field(
        description="list: show all; info NAME: show one; verify NAME: read all of it, tell what is damaged; "
        "rebuild NAME: make its search index anew; snapshot NAME FILE: write it to one file; "
        "restore FILE NAME: make a gallery of that; switch NAME OTHER: give the gallery OTHER the name NAME "
        "at once, and the one before the name OTHER; rollback NAME: undo that; drop NAME: remove it",
        json_schema_extra={"positional": True},
    )
    name: str | None = Field(
        default=None,
        description="the gallery's name; for restore the file",
        json_schema_extra={"positional": True},
    )
    other: str | None = Field(
        default=None,
        description="for snapshot the file to write, for restore the name, for switch the other gallery",
        json_schema_extra={"positional": True},
    )
    galleries: Path = Field(default=Path("galleries"), description="the folder that holds the galleries")
    index: str | None = Field(
        default=None,
        description="rebuild with this type of index from now on: auto, exact, or a FAISS factory string "
        "(HNSW16,SQ8)",
    )
    recall: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="rebuild for this share of the true 10 nearest from now on",
    )
    yes: bool = Field(default=False, description="drop without being asked")


def run(settings: Settings) -> dict[str, Any]:
    """Do what the command says.

    Returns:
        The `action` and what came of it; for list, info and rebuild `galleries`, one entry a gallery, with
        its `error` where it cannot be opened.

    Raises:
        BadSetting: A word or `--yes` is missing, or a word or flag too many.
        NotFound: There is no such folder, gallery or file.
        CrossbatchError: The gallery is damaged, or its folder cannot be written.
    """
    _check_words(settings)
    if not settings.galleries.is_dir() and settings.action != "restore":
        raise NotFound(
            f"there is no folder {settings.galleries}; give the folder of galleries by --galleries"
        )
    # A command looks and goes: it leaves background work to the server.
    with GalleryDirectory(settings.galleries, policy=RebuildPolicy(automatic=False)) as directory:
        return _ACTIONS[settings.action](directory, settings)


def complaint(result: Mapping[str, Any]) -> str | None:
    """Return the sentence that a result which shows a fault ends with."""
    if not result.get("problems"):
        return None
    return (
        f"the gallery {result['name']} is damaged; restore it from a snapshot, or drop it and index its "
        "images again (where only the index is at fault, rebuild it)"
    )


def _check_words(settings: Settings) -> None:
    wanted = _WORDS[settings.action]
    given = [word for word in (settings.name, settings.other) if word is not None]
    usage = " ".join(["crossbatch gallery", settings.action, *wanted])
    if len(given) != len(wanted):
        amount = ("no word", "one word", "two words")
        raise BadSetting(
            f"{settings.action} needs {amount[len(wanted)]} after it, and {amount[len(given)]} came: {usage}"
        )
    if settings.action != "rebuild" and (settings.index is not None or settings.recall is not None):
        raise BadSetting(f"--index and --recall are for rebuild alone; leave them out: {usage}")


def _list(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    entries = []
    for name in directory.names():
        with suppress(NotFound):  # dropped since the names were read
            entries.append(_entry(directory, name))
    return {"action": "list", "galleries": entries}


def _info(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    gallery = directory.get(_name(settings))
    return {
        "action": "info",
        "galleries": [{**dataclasses.asdict(gallery.info()), "fields": gallery.fields()}],
    }


def _verify(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    name = _name(settings)
    with stages("item") as advance:
        found = verify(directory.path_of(name), advance=advance)
    return {"action": "verify", "name": name, **dataclasses.asdict(found)}


def _rebuild(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    gallery = directory.get(_name(settings))
    with stages("item") as advance:
        gallery.rebuild(settings.index, settings.recall, progress=advance)
    return {"action": "rebuild", "galleries": [dataclasses.asdict(gallery.info())]}


def _snapshot(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    name, file = _name(settings), Path(settings.other or "")
    with stages("item") as advance:
        items = snapshot(directory.path_of(name), file, advance=advance)
    return {
        "action": "snapshot",
        "name": name,
        "file": str(file),
        "items": items,
        "bytes": file.stat().st_size,
    }


def _restore(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    file, name = Path(settings.name or ""), check_name(settings.other or "")
    with stages("item") as advance:
        items = restore(file, directory.path / name, advance=advance)
    return {"action": "restore", "name": name, "file": str(file), "items": items}


def _switch(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    name, other = _name(settings), settings.other or ""
    previous = check_name(name) in directory.names()
    directory.switch(name, other, timeout=_PATIENCE)
    return {"action": "switch", "name": name, "other": other, "previous": other if previous else None}


def _rollback(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    name = _name(settings)
    return {"action": "rollback", "name": name, "other": directory.rollback(name, timeout=_PATIENCE)}


def _drop(directory: GalleryDirectory, settings: Settings) -> dict[str, Any]:
    name = _name(settings)
    if not settings.yes:
        items = _entry(directory, name).get("items")
        count = "an unknown number of" if items is None else f"{items:,}"
        if not sys.stdin.isatty():
            raise BadSetting(
                f"dropping the gallery {name} removes {count} items for good; add --yes to do it"
            )
        sys.stderr.write(f"drop the gallery {name} with {count} items for good? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return {"action": "drop", "name": name, "dropped": False}
    directory.drop(name)
    return {"action": "drop", "name": name, "dropped": True}


_ACTIONS: Mapping[str, Callable[[GalleryDirectory, Settings], dict[str, Any]]] = {
    "list": _list,
    "info": _info,
    "verify": _verify,
    "rebuild": _rebuild,
    "snapshot": _snapshot,
    "restore": _restore,
    "switch": _switch,
    "rollback": _rollback,
    "drop": _drop,
}


def _name(settings: Settings) -> str:
    return settings.name or ""  # which names nothing; that there is one has been checked


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
