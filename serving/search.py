"""The search command: the nearest items to a photo, an item or many photos, asked of a running server."""

import json
import os
import re
import sys
import webbrowser
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from serving.client import Client, Hit
from serving.client.connection import MOST_RETRIES
from serving.errors import BadImage, CrossbatchError, InvalidArgument, Unauthenticated
from serving.gallery.search.filter import parse_filter
from serving.rpc.limits import DEFAULT_K, DEFAULT_PORT, MAX_K

__all__ = ["Settings", "remark", "render", "run"]

_SHOWN = ("key", "label", "uri", "metadata", "version")
_ENDINGS = (".parquet", ".csv", ".jsonl")
_SIDE, _MOST_BYTES = 320, 200_000  # of the query's picture on a page, in pixels and bytes
_LONG = 120.0  # seconds for a call of many photos, a slow model and three more such calls before it


class Settings(BaseModel):
    """What `crossbatch search` can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    photo: Path | None = Field(None, json_schema_extra={"positional": True})
    """Image to search for; with --out a folder of images, or a text file with the path of one a line."""
    gallery: str
    """Name of the gallery to search."""
    key: str | None = None
    """Item of the gallery to search for in place of a photo; it is left out itself."""
    address: str = f"127.0.0.1:{DEFAULT_PORT}"
    """HOST:PORT of the server."""
    k: int = Field(DEFAULT_K, ge=1, le=MAX_K)
    """Number of neighbours."""
    filter: str | None = None
    """What each must fulfil, as JSON: '{"brand": "acme", "price": {"$lt": 9}, "$label": {"$in": ["shoe",
    "boot"]}}'."""
    group_by_label: bool = False
    """Show only the nearest item of each label."""
    minimum_score: float | None = Field(None, ge=-1, le=1)
    """Least score, -1 to 1."""
    exclude: tuple[str, ...] = ()
    """Key of an item to leave out; may be given several times."""
    exclude_same: str = ""
    """Field of the metadata, or $label: leave out all that have the value there of the item, or of the best
    hit of the photo."""
    exclude_same_above: float | None = Field(None, ge=-1, le=1)
    """Least score of the photo's best hit for that; 0.9 by default."""
    model: str = ""
    """Name of the model that embeds the photo; the first one that fits by default."""
    column: tuple[str, ...] = ()
    """Field of the metadata to show in a column; may be given several times."""
    show: bool = False
    """Write the hits with their thumbnails as one HTML page, named after the photo, into the current folder;
    on a terminal, open it in the browser."""
    page: Path | None = None
    """Write that page to this file."""
    api_key: SecretStr | None = None
    """API key, if the server wants one. Set the variable rather than the flag, which other users of the
    machine can see."""
    tls: bool = False
    """Use TLS, trusting the system's authorities."""
    ca: Path | None = None
    """Use TLS, trusting the authorities in this PEM file."""
    certificate: Path | None = None
    """PEM file with your own certificate, for a server that wants one."""
    private_key: Path | None = None
    """PEM file with that certificate's key."""
    insecure: bool = False
    """Send the API key to another machine in plain text if need be."""
    timeout: float = Field(10.0, gt=0, le=3_600)
    """Seconds to wait for the answer, retries included; with --out at least 120."""
    out: Path | None = None
    """Search for many photos, and write a row a hit to this .parquet, .csv or .jsonl file. A run that was cut
    goes on when it is given again."""

    @field_validator("filter")
    @classmethod
    def _check_filter(cls, text: str | None) -> str | None:
        try:
            if text is not None:
                parse_filter(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON ({error}); put it into single quotes") from error
        except (InvalidArgument, RecursionError) as error:
            raise ValueError(str(error)) from error
        return text

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        if (self.photo is None) == (self.key is None):
            raise ValueError("Give either a PHOTO or --key to search for")
        if self.out is None and self.photo is not None and self.photo.is_dir():
            raise ValueError(f"{self.photo} is a folder; give the file for its hits by --out")
        if self.out is not None and self.photo is None:
            raise ValueError("--out is for many photos: give a folder, or a text file of their paths")
        if self.out is not None and self.column:
            raise ValueError("the file that --out names has all metadata; leave --column out")
        if self.out is not None and (self.show or self.page is not None):
            raise ValueError(
                "--show and --page are for one photo, and --out is for many: leave one of them out"
            )
        if self.out is not None and self.out.suffix not in _ENDINGS:
            raise ValueError(f"The name that --out gives must end in {' or '.join(_ENDINGS)}")
        return self


def run(settings: Settings) -> dict[str, Any]:
    """Ask the server: gives what was searched for and its hits, nearest first; with `out`, how many."""
    photo, key, out = settings.photo, settings.key, settings.out
    connection = {"tls", "ca", "certificate", "private_key", "insecure", "timeout"}
    options = settings.model_dump(include=connection)
    options["retries"] = 2  # less than a second: a person is told soon that no server is there
    if settings.api_key is not None:
        options["api_key"] = settings.api_key.get_secret_value()
    asked: dict[str, Any] = {
        "k": settings.k,
        "minimum_score": settings.minimum_score,
        "exclude": settings.exclude if key is None else (*settings.exclude, key),
        "filter": None if settings.filter is None else json.loads(settings.filter),
        "group_by_label": settings.group_by_label,
        "exclude_same": settings.exclude_same,
        "exclude_same_above": settings.exclude_same_above,
        "model": settings.model,
    }
    try:
        with Client(settings.address, **options) as client:
            if photo is not None and out is not None:
                from serving.hits import Answer, listed, write_hits  # here, as one photo needs none of it

                info = client.gallery(settings.gallery)  # that no server is there, say, is told at once
                bulk = client.with_options(retries=MOST_RETRIES, timeout=max(settings.timeout, _LONG))
                told = {**asked, "gallery": info.name, "fingerprint": info.model_fingerprint}

                def search(photos: list[Path]) -> list[Answer]:
                    return bulk.search(settings.gallery, images=photos, on_error="return", **asked)

                photos, unread = listed(photo)
                counts = write_hits(photos, search, out, told)
                return {"gallery": settings.gallery, "out": str(out), "unread": unread, **counts}
            images, keys = (None if photo is None else [photo]), (None if key is None else [key])
            drawn = settings.show or settings.page is not None
            (hits,) = client.search(
                settings.gallery, images=images, keys=keys, with_thumbnails=drawn, **asked
            )
            page = _draw(client, hits, settings) if drawn else None
    except CrossbatchError as error:
        raise error.saying(_in_words_of_the_command(error, settings)) from error
    return {
        "photo": None if photo is None else str(photo),
        "key": key,
        "gallery": settings.gallery,
        "filter": settings.filter,
        "column": list(settings.column),
        "page": None if page is None else str(page),
        "hits": [
            {"rank": rank, "score": round(hit.score, 6)} | {field: getattr(hit, field) for field in _SHOWN}
            for rank, hit in enumerate(hits, start=1)
        ],
    }


def render(result: dict[str, Any]) -> str:
    """Lay the hits out in a table: rank, score, label, what is to be shown, key, and URI if it says more."""
    if "out" in result:
        before = f", {result['resumed']:,} of them before" if result["resumed"] else ""
        told = (
            f"wrote {result['hits']:,} hits of {result['photos']:,} photos{before}, to {result['out']}; "
            f"with an error in the place of hits: {result['errors']:,}"
        )
        return "\n".join([told, *result["unread"]])
    page = [] if result["page"] is None else [f"wrote {result['page']}"]
    if not result["hits"]:
        passing = " that passes the filter" if result["filter"] else ""
        sought = result["photo"] or result["key"]
        told = f"the gallery {result['gallery']} holds no item{passing}, or none near enough to {sought}"
        return "\n".join([told, *page])
    shown = result["column"]
    rows = [["rank", "score", "label", *shown, "key"]]
    for hit in result["hits"]:
        named = hit["key"] if hit["uri"] in ("", hit["key"]) else f"{hit['key']}  {hit['uri']}"
        cells = [_worded(hit["metadata"].get(field, "")) for field in shown]
        rows.append([str(hit["rank"]), f"{hit['score']:.4f}", hit["label"], *cells, named])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = (">", ">", *"<" * (len(widths) - 2))  # the two numbers go to the right
    line = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join([*(line.format(*row).rstrip() for row in rows), *page])


def remark(result: dict[str, Any]) -> str | None:
    """Say which fields were to be shown and are in no hit, as one that is misspelt is."""
    if "out" in result:
        return None
    there = {field for hit in result["hits"] for field in hit["metadata"]}
    missing = [field for field in result["column"] if field not in there]
    if not missing or not result["hits"]:
        return None
    near = [each for field in missing for each in get_close_matches(field, there, 1)]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"no hit has {' or '.join(missing)} in its metadata{hint}"


def _draw(client: Client, hits: list[Hit], settings: Settings) -> Path:
    """Write the contact sheet; gives its path."""
    from serving.gallery.disk import written_once  # here, as a search that draws nothing needs none of it
    from serving.model.preprocess import thumbnail
    from serving.sheet import contact_sheet

    if settings.photo is None:
        query = str(settings.key)
        picture = client.get(settings.gallery, query, thumbnail=True).thumbnail
    else:
        query = settings.photo.name
        try:
            picture = thumbnail(settings.photo.read_bytes(), side=_SIDE, most_bytes=_MOST_BYTES)
        except (BadImage, OSError):  # the server may read formats that this machine does not
            picture = b""
    about = f"The nearest of the gallery {settings.gallery}, by cosine: {len(hits)} items"
    if settings.filter is not None:
        about += f" that fulfil {settings.filter}"
    if hits and not any(hit.thumbnail for hit in hits):
        about += "; it keeps no thumbnails of them, as one made by `crossbatch index --thumbnails` does"
    shown = {"gallery": settings.gallery, "columns": settings.column, "about": f"{about}."}
    text = contact_sheet(query, picture, hits, **shown)
    stem = re.sub(r"[^\w.-]+", "_", Path(query).stem)[:60].strip(".") or "search"
    path = settings.page or _free(Path(stem))
    with written_once(path) as aside:
        aside.write_text(text, encoding="utf-8")
    if settings.show and sys.stdout.isatty():
        webbrowser.open(path.absolute().as_uri())
    return path


def _free(stem: Path) -> Path:
    """Give the first of STEM.html, STEM-2.html and so on that is not there."""
    names = (stem.with_name(f"{stem}{f'-{number}' if number > 1 else ''}.html") for number in count(1))
    return next(path for path in names if not os.path.lexists(path))


def _in_words_of_the_command(error: CrossbatchError, settings: Settings) -> str:
    """Name the photo where the client counts inputs, and flags for its arguments (`ca=...`)."""
    if isinstance(error, Unauthenticated):
        given = "does not know the one it was given, or it was revoked" if settings.api_key else "got none"
        return (
            f"The server wants an API key, and {given}; put one into the variable CROSSBATCH_SEARCH_API_KEY "
            "(other users of the machine can see --api-key). `crossbatch keys` makes them at the server."
        )
    flags = re.sub(r"\b(\w+)=(True\b|\.\.\.)", lambda found: f"--{found[1].replace('_', '-')}", str(error))
    bare = flags.removeprefix("input 0: ")
    return f"{settings.photo}: {bare}" if settings.photo and bare != flags else bare


def _worded(value: Any) -> str:
    """Write a value of the metadata as one would say it, on one line."""
    return " ".join((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).split())
