"""What an indexing run over several machines has finished: a file a shard, and a note that it is whole.

NAME.npz holds what was found in some images, in order. NAME.json, written after it, says which images these
are, the model's fingerprint, and the checksum of the file. Each appears whole or not at all, and only a file
with a note that fits it counts. An image's id, of which names are made, tells its file and how that was read.
"""

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from serving.errors import BadImage, cause_of
from serving.gallery.disk import written_aside
from serving.indexing.pipeline import Found

__all__ = ["Entry", "finished", "name_of", "read_shard", "write_shard"]

Entry: TypeAlias = tuple[Found, NDArray[np.float32] | None] | OSError | BadImage
"""A file that was read, without its pixels, and its vector (d,) if it was embedded; or why it was not."""
_VERSION: Final = 1


class _Note(BaseModel):
    """What NAME.json says; `images` are those that need not be read again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    model: str
    sha256: str
    images: list[str]


def name_of(images: Iterable[str]) -> str:
    """Return the name of a shard of these images."""
    return hashlib.sha256("\n".join(images).encode()).hexdigest()[:32]


def write_shard(
    folder: Path, entries: Mapping[str, Entry], model: str, *, changed: Set[str] = frozenset()
) -> None:
    """Write what was found in images, by their ids.

    One that could not be read, or is not the file any more that its id tells of, is for the next run again.
    """
    told, vectors, pictures = list[list[object]](), list[NDArray[np.float32]](), list[bytes]()
    for id, entry in entries.items():
        if isinstance(entry, Exception):
            told.append([id, isinstance(entry, BadImage), cause_of(entry)])
            continue
        found, vector = entry
        vectors += [] if vector is None else [vector]
        pictures.append(found.picture)
        told.append(
            [id, found.size, found.mtime_ns, found.digest.hex(), vector is not None, len(found.picture)]
        )
    file = io.BytesIO()
    np.savez(
        file,
        told=np.frombuffer(json.dumps(told).encode(), np.uint8),
        vectors=np.stack(vectors) if vectors else np.empty((0, 0), np.float32),
        pictures=np.frombuffer(b"".join(pictures), np.uint8),
    )
    data, name = file.getvalue(), name_of(entries)
    read = [id for id, entry in entries.items() if not isinstance(entry, OSError) and id not in changed]
    note = _Note(version=_VERSION, model=model, sha256=_checksum(data, read), images=read)
    with written_aside(folder / f"{name}.npz") as aside:
        aside.write_bytes(data)
    with written_aside(folder / f"{name}.json") as aside:
        aside.write_text(note.model_dump_json())


def read_shard(folder: Path, name: str) -> dict[str, Entry]:
    """Return what a shard holds, by the ids of its images."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        told = json.loads(file["told"].tobytes())
        vectors, pictures = iter(file["vectors"]), io.BytesIO(file["pictures"].tobytes())
    entries = dict[str, Entry]()
    for id, first, *rest in told:
        if len(rest) == 1:
            entries[id] = BadImage(rest[0]) if first else OSError(rest[0])
        else:
            mtime_ns, digest, embedded, length = rest
            found = Found(first, mtime_ns, bytes.fromhex(digest), picture=pictures.read(length))
            entries[id] = found, next(vectors) if embedded else None
    return entries


def finished(folder: Path, model: str, wanted: Collection[str]) -> dict[str, str]:
    """Return which of the images `wanted` are in whole shards of a model, and in which."""
    where = dict[str, str]()
    for path in sorted(folder.glob("*.json")):
        try:
            note = _Note.model_validate_json(path.read_bytes())
            images = {*note.images}.intersection(wanted)
            if note.version == _VERSION and note.model == model and images:
                data = path.with_suffix(".npz").read_bytes()
                if _checksum(data, note.images) == note.sha256:
                    where |= dict.fromkeys(images, path.stem)
        except (OSError, ValidationError):  # damaged, foreign, or going in this moment
            continue
    return where


def _checksum(data: bytes, images: Sequence[str]) -> str:
    """Return the SHA-256 of a file, and of the ids of the images in it."""
    return hashlib.sha256("\n".join(images).encode() + data).hexdigest()
