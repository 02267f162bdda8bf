"""The search command: the nearest items to a photo, asked of a running server."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from serving.client import Client
from serving.rpc.limits import DEFAULT_K, DEFAULT_PORT, MAX_K

__all__ = ["Settings", "render", "run"]

RETRIES = 4  # less than a second: a person is told soon that no server is there


class Settings(BaseModel):
    """What `crossbatch search` can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    photo: Path = Field(description="Image to search for.", json_schema_extra={"positional": True})
    gallery: str = Field(description="Name of the gallery to search.")
    address: str = Field(default=f"127.0.0.1:{DEFAULT_PORT}", description="HOST:PORT of the server.")
    k: int = Field(default=DEFAULT_K, ge=1, le=MAX_K, description="Number of neighbours.")
    timeout: float = Field(
        default=10.0, gt=0, le=3_600, description="Seconds to wait for the answer, retries included."
    )


def run(settings: Settings) -> dict[str, Any]:
    """Ask the server.

    Returns:
        The query and its hits, nearest first.

    Raises:
        BadImage: if the photo cannot be read.
        CrossbatchError: if the server is not there or refuses.
    """
    with Client(settings.address, timeout=settings.timeout, retries=RETRIES) as client:
        (hits,) = client.search(settings.gallery, images=[settings.photo], k=settings.k)
    return {
        "photo": str(settings.photo),
        "gallery": settings.gallery,
        "hits": [
            {
                "rank": rank,
                "score": round(hit.score, 6),
                "label": hit.label,
                "key": hit.key,
                "uri": hit.uri,
                "metadata": dict(hit.metadata),
            }
            for rank, hit in enumerate(hits, start=1)
        ],
    }


def render(result: dict[str, Any]) -> str:
    """Lay the hits out in a table.

    Returns:
        A head and one line a hit: rank, score, label, key, and the URI where it says more than the key.
    """
    if not result["hits"]:
        return f"no item of gallery {result['gallery']} is near {result['photo']}"
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
