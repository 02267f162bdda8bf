"""Publishing: a gallery in a folder that its readers see, for `crossbatch gallery follow`.

    NAME.generation-<n>/    the gallery in one state, with its index (`archive`); the newest two
    NAME.json               the manifest: which of them is the newest, and what it is; put in place last

Of the folder no more is assumed than that a file can be written from its beginning to its end, and a small
one renamed over another: no locks, and no order in which readers come to see what was written. The manifest
tells size and SHA-256 of each file, so who finds a part of one, or none, notices and looks again. One machine
publishes a gallery.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from serving.errors import BadArtifact, InvalidArgument, NotFound, Unavailable
from serving.gallery.archive import copy_indexed
from serving.gallery.disk import disk_error, rewrite
from serving.gallery.folder import claimed
from serving.gallery.index.builder import Advance
from serving.gallery.note import check_own
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store

__all__ = ["Manifest", "copy_hashed", "publish"]

FileName = Annotated[str, Field(pattern=rf"^({FILE_NAME}|index-[0-9a-f-]+\.(faiss|columns))$")]
_PIECE = 1 << 20  # bytes
_MOST_MANIFEST = 1 << 20  # bytes


class FileFacts(NamedTuple):
    """What a file has to be."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What the newest generation of a gallery is."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    name: str
    generation: int  # grows by one
    id: str  # random, should a folder be begun anew
    time: AwareDatetime  # so late it was the writer's state for certain
    items: int
    model_name: str
    fingerprint: str
    host: str  # the writer's
    state: str  # by which the writer knows whether anything has changed since
    files: dict[FileName, FileFacts]

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Read the manifest of a gallery."""
        path = folder / f"{name}.json"
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for without end
                raise BadArtifact(f"{path} is no file; look at what publishes there")
            with path.open("rb") as file:
                manifest = cls.model_validate_json(file.read(_MOST_MANIFEST))
        except OSError as error:
            raise Unavailable(
                f"the manifest {path} cannot be read ({error.strerror}); see that crossbatch gallery publish "
                f"{name} writes to that folder, and that it is mounted here"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            raise BadArtifact(
                f"{path} is no manifest that this crossbatch reads ({'.'.join(map(str, first['loc']))}: "
                f"{first['msg']}); upgrade it, or remove that file and publish the gallery again"
            ) from error
        if manifest.name != name:
            raise BadArtifact(f"{path} is of the gallery {manifest.name}; look at what publishes there")
        return manifest

    def home(self, folder: Path) -> Path:
        """Return where the files lie."""
        return _home(folder, self.name, self.generation)

    def is_in(self, folder: Path) -> bool:
        """Tell whether all files are there, by their sizes."""
        try:
            return all((self.home(folder) / it).stat().st_size == self.files[it].bytes for it in self.files)
        except OSError:
            return False


def publish(path: Path, folder: Path, *, advance: Advance = lambda *_: None) -> tuple[Manifest, bool]:
    """Publish the gallery at `path` in a folder, unless nothing has changed; returns whether that was done.

    The time in the manifest is this one, either way.
    """
    name = path.name
    if folder.resolve() == path.parent.resolve():
        raise InvalidArgument(f"{folder} holds galleries; publish in a folder of its own")
    check_own(path)
    with claimed(path, "publish") as work:
        now = datetime.now(UTC)
        with closing(Store(path / FILE_NAME)) as store, store.read() as reader:
            meta, state = store.meta, f"{store.meta.id} {reader.change()}"
        try:
            if not folder.is_dir():
                raise NotFound(f"there is no folder {folder} to publish in; make it, or mount it")
            last = Manifest.read(folder, name) if (folder / f"{name}.json").exists() else None
            if last is not None and last.state == state and last.is_in(folder):
                _put(manifest := last.model_copy(update={"time": now}), folder)
                return manifest, False
            named = re.compile(rf"{re.escape(name)}\.generation-(\d+)")
            found = {int(it[1]): each for each in folder.iterdir() if (it := named.fullmatch(each.name))}
            generation = 1 + (last.generation if last else max(found, default=0))
            home = _home(folder, name, generation)
            if generation in found:  # what a crash has left
                shutil.rmtree(home)
            files, items = copy_indexed(path, work, advance=advance)
            home.mkdir()
            try:
                facts = {each.name: copy_hashed(each, home / each.name) for each in files}
            except BaseException:
                shutil.rmtree(home, ignore_errors=True)  # the disk may be full, of it
                raise
            manifest = Manifest(
                name=name,
                generation=generation,
                id=secrets.token_hex(8),
                time=now,
                items=items,
                model_name=meta.model_name,
                fingerprint=meta.fingerprint,
                host=socket.gethostname(),
                state=state,
                files=facts,
            )
            _put(manifest, folder)
        except OSError as error:
            raise disk_error(error, f"the folder {folder}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        kept = generation, last.generation if last else 0  # which somebody may be fetching
        for number, each in found.items():
            if number not in kept:
                shutil.rmtree(each, ignore_errors=True)
        return manifest, True


def copy_hashed(source: Path, target: Path, *, most: int | None = None) -> FileFacts:
    """Copy a file onto the disk, `most` bytes and a piece at most, and return what was copied."""
    digest, size = hashlib.sha256(), 0
    try:
        if not source.is_file():  # it has not come yet, or is a pipe, which would be waited for without end
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with source.open("rb") as file, target.open("xb") as out:
            while (most is None or size <= most) and (piece := file.read(_PIECE)):
                digest.update(piece)
                size += out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Unavailable(
            f"{source} cannot be copied to {target.parent} ({error.strerror}); it has not come yet, is gone, "
            "or a disk fails"
        ) from error
    return FileFacts(size, digest.hexdigest())


def _home(folder: Path, name: str, generation: int) -> Path:
    return folder / f"{name}.generation-{generation}"


def _put(manifest: Manifest, folder: Path) -> None:
    rewrite(folder / f"{manifest.name}.json", manifest.model_dump_json(indent=1))
