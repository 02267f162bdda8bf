"""The command `crossbatch gallery`: look after the galleries of a folder."""

import csv
import dataclasses
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import BadSetting, CrossbatchError, NotFound, Unsupported
from serving.gallery.address import Place, placed
from serving.gallery.archive import restore, snapshot
from serving.gallery.directory import GalleryDirectory, check_name
from serving.gallery.disk import disk_error, written_aside
from serving.gallery.folder import claimed
from serving.gallery.follow import follow, repeat
from serving.gallery.index.builder import Advance
from serving.gallery.index.rebuild import RebuildPolicy
from serving.gallery.map import MapMethod, make_map
from serving.gallery.place import Galleries, galleries_at, kinds_by_field
from serving.gallery.publish import Manifest, publish
from serving.gallery.report import render
from serving.gallery.search.duplicates import Duplicate
from serving.gallery.verify import verify
from serving.progress import stages

__all__ = ["Settings", "complaint", "render", "run"]

_EVERY = 5.0  # seconds
_OF_ONE = {
    "index": "rebuild", "recall": "rebuild", "above": "duplicates", "out": "duplicates",
    "thumbnails": "export", "sync": "copy", "model": "import", "method": "map",
    "every": "publish and follow", "once": "follow", "any_model": "follow", "older": "follow",
}  # fmt: skip
"""Flags that are for some actions alone."""
_IN_FOLDERS = {
    "verify": "Milvus looks after its own files",
    "snapshot": "back Milvus up by its own tools, or copy the gallery into a folder",
    "restore": "restore it into a folder, and copy it from there",
    "map": "copy the gallery into a folder, make the map there, and copy it back",
    "publish": "all servers see the same Milvus, and need no copy of it",
    "follow": "all servers see the same Milvus, and need no copy of it",
}
"""Actions that Milvus has none of, and what to do there."""


class Settings(BaseModel):
    """Settings of `crossbatch gallery`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    action: Literal[
        "list", "info", "verify", "duplicates", "rebuild", "snapshot", "restore", "switch", "rollback",
        "drop", "export", "import", "copy", "map", "publish", "follow",
    ] = Field(json_schema_extra={"positional": True})  # fmt: skip
    """list: show all; info NAME: show one; verify NAME: read all of it, tell what is damaged; duplicates
    NAME: find items that are nearly alike; rebuild NAME: make its search index anew; snapshot NAME FILE:
    write it to one file; restore FILE NAME: make a gallery of that; switch NAME OTHER: give the gallery OTHER
    the name NAME at once, and the one before the name OTHER; rollback NAME: undo that; drop NAME: remove it;
    export NAME FILE: write its items and their vectors as parquet; import NAME FILE: put the items of such a
    file into it, or into a new gallery; copy NAME OTHER: let OTHER, made if it is not there, hold what NAME
    does, each by its name, its path or as milvus://HOST:19530/NAME; map NAME: give each item a place near
    those that are like it, as map_x and map_y of its metadata; publish NAME FOLDER: put a snapshot of it
    where its readers look; follow NAME FOLDER: be a reader, fetch each new one and serve it in place of the
    one before"""
    name: str | None = Field(None, json_schema_extra={"positional": True})
    """the gallery's name; for restore the file"""
    other: str | None = Field(None, json_schema_extra={"positional": True})
    """for snapshot and export the file to write, for import the one to read, for restore the name, for switch
    and copy the other gallery, for publish and follow the folder of snapshots"""
    galleries: Place = Path("galleries")
    """the folder that holds the galleries, or a Milvus as milvus://HOST:19530"""
    index: str | None = None
    """rebuild with this type of index from now on: auto, exact, or a FAISS factory string (HNSW16,SQ8)"""
    recall: float | None = Field(None, gt=0, le=1)
    """rebuild for this share of the true 10 nearest from now on"""
    above: float = Field(0.97, ge=-1, le=1)
    """duplicates of this score or more"""
    out: Path | None = None
    """CSV file of all pairs of duplicates to write"""
    yes: bool = False
    """drop without being asked"""
    thumbnails: bool = False
    """export the thumbnails, too"""
    sync: bool = False
    """delete what OTHER has and NAME, which is copied to it, has not"""
    method: MapMethod = "pca"
    """how a map is made: pca in seconds; umap, by umap-learn, slower and with clearer groups"""
    model: Path | None = None
    """for import: the model file that made the vectors, where the file of them does not say which did"""
    every: float | None = Field(None, gt=0)
    """publish again after so many seconds each, where something has changed, until Ctrl-C; or look so often
    when following (5 unless given)"""
    once: bool = False
    """follow: look once and end"""
    any_model: bool = False
    """follow: take a generation of another model, too, than that of the one before"""
    older: bool = False
    """follow: take a generation that is older than the one served, too, or that was rolled back"""


def run(settings: Settings) -> dict[str, Any]:
    """Do what the command says; returns the `action` and what came of it.

    For list, info and rebuild that is `galleries`, an entry each, with its `error` where it cannot be opened.
    """
    words = [word for word in (settings.name, settings.other) if word is not None]
    _check_words(settings, words)
    place, (work, *_) = settings.galleries, _ACTIONS[settings.action]
    if settings.action != "copy" and (far := next((word for word in words if "://" in word), "")):
        raise BadSetting(f"{far} is a place; give that of the galleries by --galleries, and the name alone")
    if isinstance(place, str) and (instead := _IN_FOLDERS.get(settings.action)):
        raise Unsupported(f"{settings.action} is for galleries in a folder; {instead}")
    made_here = settings.action in ("restore", "import", "copy", "follow")
    if isinstance(place, Path) and not (made_here or place.is_dir()):
        raise NotFound(f"there is no folder {place}; give that of galleries by --galleries")
    with _at(place) as directory:
        return {"action": settings.action, **work(directory, settings, *words)}


def _at(place: Path | str) -> Galleries:
    """Open a place of galleries; a command looks and goes, and leaves background work to the server."""
    return galleries_at(place, policy=RebuildPolicy(automatic=False))


def complaint(result: Mapping[str, Any]) -> str | None:
    """Return the sentence that a result which shows a fault ends with."""
    if not result.get("problems"):
        return None
    return (
        f"the gallery {result['name']} is damaged; restore it from a snapshot, or drop it and index its "
        "images again (where only the index is at fault, rebuild it)"
    )


def _check_words(settings: Settings, words: list[str]) -> None:
    _, *wanted = _ACTIONS[settings.action]
    usage = " ".join(["crossbatch gallery", settings.action, *wanted])
    if len(words) != len(wanted):
        amount = ("no word", "one word", "two words")
        raise BadSetting(
            f"{settings.action} needs {amount[len(wanted)]} after it, and {amount[len(words)]} came: {usage}"
        )
    for flag, action in _OF_ONE.items():
        if flag in settings.model_fields_set and settings.action not in action.split(" and "):
            raise BadSetting(f"--{flag.replace('_', '-')} is for {action} alone; leave it out: {usage}")


def _list(directory: Galleries, _: Settings) -> dict[str, Any]:
    entries = []
    for name in directory.names():
        with suppress(NotFound):  # dropped since the names were read
            entries.append(_entry(directory, name))
    return {"galleries": entries}


def _info(directory: Galleries, _: Settings, name: str) -> dict[str, Any]:
    gallery = directory.get(name)
    more = {"fields": kinds_by_field(gallery), "thumbnail_side": gallery.meta.thumbnail_side}
    return {"galleries": [{**dataclasses.asdict(gallery.info()), **more}]}


def _verify(directory: GalleryDirectory, _: Settings, name: str) -> dict[str, Any]:
    with stages("item") as advance:
        found = verify(directory.path_of(name), advance=advance)
    return {"name": name, **dataclasses.asdict(found)}


def _duplicates(directory: Galleries, settings: Settings, name: str) -> dict[str, Any]:
    out, gallery = settings.out, directory.get(name)
    with stages("item") as advance:
        pairs = gallery.duplicates(settings.above, progress=advance)
    clusters: dict[int, set[str]] = {}
    for pair in pairs:
        clusters.setdefault(pair.cluster, set()).update((pair.key, pair.other))
    if out is not None:
        try:
            with written_aside(out) as aside, aside.open("w", encoding="utf-8", newline="") as file:
                table = csv.writer(file)
                table.writerow(each.name for each in dataclasses.fields(Duplicate))
                table.writerows(map(dataclasses.astuple, pairs))
        except OSError as error:
            raise disk_error(error, f"the file {out}") from error
    return {
        "name": name,
        "above": settings.above,
        "items": gallery.count(),
        "pairs": [dataclasses.asdict(pair) for pair in pairs],
        "clusters": [sorted(keys) for keys in clusters.values()],
        "file": None if out is None else str(out),
    }


def _rebuild(directory: Galleries, settings: Settings, name: str) -> dict[str, Any]:
    gallery = directory.get(name)
    with stages("item") as advance:
        gallery.rebuild(settings.index, settings.recall, progress=advance)
    return {"galleries": [dataclasses.asdict(gallery.info())]}


def _snapshot(directory: GalleryDirectory, _: Settings, name: str, file: str) -> dict[str, Any]:
    path = Path(file)
    with stages("item") as advance:
        items = snapshot(directory.path_of(name), path, advance=advance)
    return {"name": name, "file": str(path), "items": items, "bytes": path.stat().st_size}


def _restore(directory: GalleryDirectory, _: Settings, file: str, name: str) -> dict[str, Any]:
    path = directory.path / check_name(name)
    with stages("item") as advance:
        items = restore(Path(file), path, advance=advance)
    return {"name": name, "file": str(Path(file)), "items": items}


def _switch(directory: Galleries, settings: Settings, name: str, other: str) -> dict[str, Any]:
    previous = check_name(name) in directory.names()
    directory.switch(name, other)
    place = str(settings.galleries)
    return {"name": name, "other": other, "previous": other if previous else None, "galleries": place}


def _rollback(directory: Galleries, _: Settings, name: str) -> dict[str, Any]:
    return {"name": name, "other": directory.rollback(name)}


def _drop(directory: Galleries, settings: Settings, name: str) -> dict[str, Any]:
    if not settings.yes:
        items = _entry(directory, name).get("items")
        count = "an unknown number of" if items is None else f"{items:,}"
        if not sys.stdin.isatty():
            raise BadSetting(f"dropping the gallery {name} removes {count} items for good; add --yes")
        sys.stderr.write(f"drop the gallery {name} with {count} items for good? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return {"name": name, "dropped": False}
    directory.drop(name)
    return {"name": name, "dropped": True}


def _export(directory: Galleries, settings: Settings, name: str, file: str) -> dict[str, Any]:
    from serving.gallery.vectors import export_items  # here, as few need what it needs

    path = Path(file)
    with stages("item") as advance:
        items = export_items(directory.get(name), path, thumbnails=settings.thumbnails, advance=advance)
    return {"name": name, "file": str(path), "items": items, "bytes": path.stat().st_size}


def _import(directory: Galleries, settings: Settings, name: str, file: str) -> dict[str, Any]:
    from serving.gallery.vectors import Maker, import_items
    from serving.model.spec import read_spec

    model = None
    if settings.model is not None:
        model = Maker.model_validate(read_spec(settings.model), from_attributes=True)
    with stages("item") as advance:
        rows = import_items(directory, name, Path(file), model=model, advance=advance)
    items = directory.get(name).info().items
    return {"name": name, "file": str(Path(file)), "rows": rows, "items": items}


def _copy(_: Galleries, settings: Settings, name: str, other: str) -> dict[str, Any]:
    from serving.gallery.copying import copy_gallery  # as above

    (at, first), (to, second) = (placed(word, settings.galleries) for word in (name, other))
    with _at(at) as here, _at(to) as there, stages("item") as advance:
        report = copy_gallery(here.get(first), there, second, sync=settings.sync, advance=advance)
    return {"name": name, "other": other, **dataclasses.asdict(report)}


def _map(directory: GalleryDirectory, settings: Settings, name: str) -> dict[str, Any]:
    gallery = directory.get(name)
    with stages("item") as advance:
        made = make_map(gallery, settings.method, progress=advance)
        if made.moved:  # a new index, as to that before each of them is another item
            gallery.rebuild(whole=False, progress=advance)
    return {"name": name, **dataclasses.asdict(made)}


def _publish(directory: GalleryDirectory, settings: Settings, name: str, folder: str) -> dict[str, Any]:
    def work(**options: Advance) -> tuple[Manifest, bool]:
        return publish(directory.path_of(name), Path(folder), **options)  # which may come later

    return _repeated("publish", work, settings.every)


def _follow(directory: GalleryDirectory, settings: Settings, name: str, folder: str) -> dict[str, Any]:
    path = directory.path / check_name(name)
    work = partial(follow, path, Path(folder), any_model=settings.any_model, older=settings.older)
    with claimed(path, "follow"):
        return _repeated("follow", work, None if settings.once else settings.every or _EVERY)


def _repeated(action: str, work: Callable[..., tuple[Manifest, bool]], every: float | None) -> dict[str, Any]:
    """Publish or follow once, or without an end, telling what is new."""

    def result(**options: Advance) -> dict[str, Any]:
        manifest, new = work(**options)
        return {"name": manifest.name, "generation": manifest.generation, "items": manifest.items, "new": new}

    def told() -> str:
        found = result()
        return render({"action": action, **found}) if found["new"] else ""

    if every is not None:
        repeat(told, every)
    with stages("item") as advance:
        return result(advance=advance)


_ACTIONS: dict[str, tuple[Any, ...]] = {  # what does it, and the words it takes
    "list": (_list,),
    "info": (_info, "NAME"),
    "verify": (_verify, "NAME"),
    "duplicates": (_duplicates, "NAME"),
    "rebuild": (_rebuild, "NAME"),
    "snapshot": (_snapshot, "NAME", "FILE"),
    "restore": (_restore, "FILE", "NAME"),
    "switch": (_switch, "NAME", "OTHER"),
    "rollback": (_rollback, "NAME"),
    "drop": (_drop, "NAME"),
    "export": (_export, "NAME", "FILE"),
    "import": (_import, "NAME", "FILE"),
    "copy": (_copy, "NAME", "OTHER"),
    "map": (_map, "NAME"),
    "publish": (_publish, "NAME", "FOLDER"),
    "follow": (_follow, "NAME", "FOLDER"),
}


def _entry(directory: Galleries, name: str) -> dict[str, Any]:
    try:
        return dataclasses.asdict(directory.get(name).info())
    except NotFound:
        raise
    except CrossbatchError as error:  # it hides no other gallery
        return {"name": name, "error": str(error)}
