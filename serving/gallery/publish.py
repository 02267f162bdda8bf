"""Publishing: snapshots of a gallery in a folder that its readers see, for `crossbatch gallery follow`.

    NAME.generation-<n>/    the gallery in one state, with its index (`archive`); the newest two
    NAME.json               the manifest: which of them is the newest, and what it is; put in place last

Of the folder no more is assumed than that a file can be written from its beginning to its end, and a small
one renamed over another: no locks, and no order in which readers come to see what was written. The manifest
tells size and SHA-256 of each file, so who finds a part of one, or none, notices and looks again. One machine
publishes a gallery.
"""

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from serving.errors import AlreadyExists, BadArtifact, NotFound, Unavailable
from serving.gallery.archive import copy_indexed
from serving.gallery.disk import disk_error, rewrite, sync
from serving.gallery.folder import claimed
from serving.gallery.index.builder import Advance
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store

__all__ = ["Manifest", "copy_hashed", "publish"]

FORMAT = 1
_PIECE = 1 << 20  # bytes


FileName = Annotated[str, Field(pattern=rf"^({FILE_NAME}|index-[0-9a-f-]+\.(faiss|columns))$")]


class FileFacts(NamedTuple):
    """What a file has to be."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What the newest snapshot of a gallery is."""

    model_config = ConfigDict(frozen=True)

    format: int = FORMAT
    name: str
    generation: int  # grows with each snapshot
    time: AwareDatetime  # so late it was the writer's state for certain
    items: int
    files: dict[FileName, FileFacts]
    model_name: str
    fingerprint: str
    host: str  # the writer's
    state: str  # the writer's, by which he knows whether anything has changed since

    @field_validator("files")
    @classmethod
    def _has_items(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        if FILE_NAME not in files:
            raise ValueError(f"{FILE_NAME} is not among them")
        return files

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Read the manifest of a gallery; BadArtifact tells that it is none, NotFound that there is none."""
        path = folder / f"{name}.json"
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise NotFound(
                f"there is no manifest {path}; let crossbatch gallery publish {name} write to that folder, "
                "and see that it is mounted here"
            ) from error
        except OSError as error:
            raise Unavailable(f"the manifest {path} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first = error.errors()[0]
            told = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise BadArtifact(
                f"{path} is no manifest of crossbatch gallery publish ({told}); remove it, and publish the "
                f"gallery {name} again"
            ) from error
        if (manifest.format, manifest.name) != (FORMAT, name):
            raise BadArtifact(
                f"{path} is of the gallery {manifest.name} and of format {manifest.format}; expected {name} "
                f"and {FORMAT}: look at what publishes there, or upgrade crossbatch"
            )
        return manifest

    def home(self, folder: Path) -> Path:
        """Return where the files lie."""
        return _home(folder, self.name, self.generation)

    @property
    def sha256(self) -> str:
        """What no other snapshot has."""
        return self.files[FILE_NAME].sha256


def publish(path: Path, folder: Path, *, advance: Advance = lambda *_: None) -> tuple[Manifest, bool]:
    """Publish the gallery at `path` into a folder, unless nothing has changed; returns whether that was so.

    The time in the manifest is this one, either way.
    """
    name = path.name
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder} to publish to; make it, or mount it")
    with claimed(path, "publish") as work:
        now = datetime.now(UTC)
        with closing(Store(path / FILE_NAME)) as store, store.read() as reader:
            meta, stands = store.meta, reader.state()
        state = f"{meta.id} {stands.change}"
        last = _last(folder, name)
        if last is not None and last.state == state and _is_there(last, folder):
            manifest = last.model_copy(update={"time": now})
            _put(manifest, folder)
            return manifest, False
        found = _snapshots(folder, name)
        generation = 1 + (last.generation if last else max(found, default=0))
        home = _home(folder, name, generation)
        try:
            if generation in found:  # what a crash has left
                shutil.rmtree(home)
            files, items = copy_indexed(path, work, advance=advance)
            home.mkdir()
            facts = {each.name: copy_hashed(each, home / each.name) for each in files}
        except OSError as error:
            raise disk_error(error, f"the folder {home}") from error
        finally:
            for each in work.iterdir():
                each.unlink()
        manifest = Manifest(
            name=name,
            generation=generation,
            time=now,
            items=items,
            files=facts,
            model_name=meta.model_name,
            fingerprint=meta.fingerprint,
            host=socket.gethostname(),
            state=state,
        )
        _put(manifest, folder)
        kept = generation, last.generation if last else 0  # which somebody may be fetching
        for number, each in found.items():
            if number not in kept:
                shutil.rmtree(each, ignore_errors=True)
        return manifest, True


def copy_hashed(source: Path, target: Path, *, most: int | None = None) -> FileFacts:
    """Copy a file to one that is not there yet, on disk; returns bytes and SHA-256 of what was copied.

    It ends behind `most` bytes. Where it fails, nothing is left at `target`.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with target.open("xb") as out:
            try:
                for piece in _pieces(source):
                    digest.update(piece)
                    size += out.write(piece)
                    if most is not None and size > most:
                        break
                out.flush()
                os.fsync(out.fileno())
            except BaseException:
                with suppress(OSError):
                    target.unlink()
                raise
        sync(target.parent)
    except FileExistsError as error:
        raise AlreadyExists(
            f"there is already something at {target}: another machine is publishing"
        ) from error
    except OSError as error:
        raise disk_error(error, f"the file {target}") from error
    return FileFacts(size, digest.hexdigest())


def _pieces(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError as error:
        raise NotFound(f"there is no snapshot {source}; it has not come yet, or is gone already") from error
    except OSError as error:
        raise Unavailable(f"the snapshot {source} cannot be read ({error.strerror})") from error


def _put(manifest: Manifest, folder: Path) -> None:
    path = folder / f"{manifest.name}.json"
    try:
        rewrite(path, manifest.model_dump_json(indent=1))
    except OSError as error:
        raise disk_error(error, f"the manifest {path}") from error


def _last(folder: Path, name: str) -> Manifest | None:
    with suppress(NotFound):
        return Manifest.read(folder, name)
    return None


def _is_there(manifest: Manifest, folder: Path) -> bool:
    with suppress(OSError):
        home = manifest.home(folder)
        return all((home / name).stat().st_size == it.bytes for name, it in manifest.files.items())
    return False


def _home(folder: Path, name: str, generation: int) -> Path:
    return folder / f"{name}.generation-{generation}"


def _snapshots(folder: Path, name: str) -> dict[int, Path]:
    """Return the snapshots of a gallery, whole or not, by generation."""
    named = re.compile(rf"{re.escape(name)}\.generation-(\d+)")
    try:
        return {int(found[1]): each for each in folder.iterdir() if (found := named.fullmatch(each.name))}
    except OSError as error:
        raise Unavailable(f"the folder {folder} cannot be read ({error.strerror})") from error
