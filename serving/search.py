"""The search command: the nearest items to a photo or to another item, asked of a running server."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.client import Client, Hit
from serving.errors import InvalidArgument
from serving.gallery.search.filter import parse_filter
from serving.rpc.limits import DEFAULT_K, DEFAULT_PORT, MAX_K

__all__ = ["Settings", "render", "run"]

RETRIES = 4  # less than a second: a person is told soon that no server is there


class Settings(BaseModel):
    """What `crossbatch search` can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    photo: Path | None = Field(
        default=None, description="Image to search for.", json_schema_extra={"positional": True}
    )
    gallery: str = Field(description="Name of the gallery to search.")
    key: str | None = Field(
        default=None,
        description="Item of the gallery to search for in place of a photo; it is left out itself.",
    )
    address: str = Field(default=f"127.0.0.1:{DEFAULT_PORT}", description="HOST:PORT of the server.")
    k: int = Field(default=DEFAULT_K, ge=1, le=MAX_K, description="Number of neighbours.")
    filter: str | None = Field(
        default=None,
        description="What each must fulfil, as JSON: "
        '\'{"brand": "acme", "price": {"$lt": 9}, "$label": {"$in": ["shoe", "boot"]}}\'.',
    )
    group_by_label: bool = Field(default=False, description="Show only the nearest item of each label.")
    minimum_score: float | None = Field(default=None, ge=-1, le=1, description="Least score, -1 to 1.")
    exclude: tuple[str, ...] = Field(
        default=(), description="Key of an item to leave out; may be given several times."
    )
    timeout: float = Field(
        default=10.0, gt=0, le=3_600, description="Seconds to wait for the answer, retries included."
    )

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
        return self


def run(settings: Settings) -> dict[str, Any]:
    """Ask the server.

    Returns:
        The photo or the key that was searched for and its hits, nearest first.

    Raises:
        BadImage: if the photo cannot be read.
        CrossbatchError: if the server is not there or refuses.
    """
    photo, key = settings.photo, settings.key
    with Client(settings.address, timeout=settings.timeout, retries=RETRIES) as client:
        (hits,) = client.search(
            settings.gallery,
            images=None if photo is None else [photo],
            keys=None if key is None else [key],
            k=settings.k,
            minimum_score=settings.minimum_score,
            exclude=settings.exclude if key is None else (*settings.exclude, key),
            filter=None if settings.filter is None else json.loads(settings.filter),
            group_by_label=settings.group_by_label,
        )
    return {
        "photo": None if photo is None else str(photo),
        "key": key,
        "gallery": settings.gallery,
        "filter": settings.filter,
        "hits": [_told(rank, hit) for rank, hit in enumerate(hits, start=1)],
    }


def render(result: dict[str, Any]) -> str:
    """Lay the hits out in a table.

    Returns:
        A head and one line a hit: rank, score, label, key, and the URI where it says more than the key.
    """
    if not result["hits"]:
        passing = " that passes the filter" if result["filter"] else ""
        return f"no item of gallery {result['gallery']}{passing} is near {result['photo'] or result['key']}"
    rows = [("rank", "score", "label", "key")]
    rows += [
        (
            str(hit["rank"]),
            f"{hit['score']:.4f}",
            hit["label"],
            hit["key"] if hit["uri"] in ("", hit["key"]) else f"{hit['key']}  {hit['uri']}",
        )
        for hit in result["hits"]
    ]
    rank, score, label = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(f"{a:>{rank}}  {b:>{score}}  {c:<{label}}  {d}".rstrip() for a, b, c, d in rows)


def _told(rank: int, hit: Hit) -> dict[str, Any]:
    return {
        "rank": rank,
        "score": round(hit.score, 6),
        "label": hit.label,
        "key": hit.key,
        "version": hit.version,
        "uri": hit.uri,
        "metadata": dict(hit.metadata),
    }
