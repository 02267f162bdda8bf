"""Archives: a gallery in one file, and a gallery from one.

A snapshot is a gallery file of one state, without an index; what is restored of it is a gallery of its own,
with another id. Both are made aside, verified, and then put in their places at once.
"""

import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

from serving.errors import BadArtifact, InvalidArgument, NotFound, Unavailable
from serving.gallery.disk import written_once
from serving.gallery.folder import check_path, made_aside
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.index.builder import Advance
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store
from serving.gallery.verify import Verification, verify

__all__ = ["copy_indexed", "restore", "snapshot"]

_TRIES = 3  # a rebuild takes longer than a copy: three that end in three copies are no accident


def snapshot(path: Path, file: Path, *, advance: Advance = lambda *_: None) -> int:
    """Write the gallery at `path` to a new file, while writes go on, and verify it; returns how many items.

    The file appears whole and on disk, or not at all. BadArtifact tells that the gallery is damaged.
    """
    check_path(file)
    with closing(Store(path / FILE_NAME)) as store, written_once(file) as aside:
        store.copy_to(aside)
        found = verify(aside, advance=advance)
        if found.problems:
            raise _damaged(path, found)
    return found.items


def copy_indexed(path: Path, folder: Path, *, advance: Advance = lambda *_: None) -> tuple[list[Path], int]:
    """Copy a gallery of one state with its index into a folder of ours, while writes go on, and verify it.

    What was in the folder is removed. Returns the files and how many items; raises as `snapshot` does.
    """
    for _ in range(_TRIES):
        for each in folder.iterdir():
            each.unlink()
        file = folder / FILE_NAME
        with closing(Store(path / FILE_NAME)) as store:
            store.copy_to(file, indexed=True)
        with closing(Store(file)) as store, store.read() as reader:
            index = reader.state().index_file
        files = [path / index, (path / index).with_suffix(".columns")] if index else []
        with suppress(FileNotFoundError):  # since then a newer one was published, and this one removed
            for each in files:
                _link(each, folder / each.name)
            found = verify(folder, advance=advance)
            if found.problems:
                raise _damaged(path, found)
            return [file, *(folder / each.name for each in files)], found.items
    raise Unavailable(
        f"the index of the gallery {path.name} is gone, or replaced again and again; try again, or make it "
        f"anew by crossbatch gallery rebuild {path.name}"
    )


def restore(file: Path, path: Path, *, advance: Advance = lambda *_: None) -> int:
    """Make a gallery at `path` of a snapshot and build its index; returns how many items it has.

    The gallery appears complete or not at all. BadArtifact tells that the snapshot is damaged, or of another
    format version, InvalidArgument that it is the file of a gallery in use.
    """
    if not file.is_file():
        raise NotFound(f"there is no snapshot {file}; give a file that crossbatch gallery snapshot wrote")
    if file.with_name(f"{file.name}-wal").exists():
        raise InvalidArgument(
            f"{file} is a gallery in use and not all of it is in that file; make a snapshot of the gallery "
            "by crossbatch gallery snapshot"
        )
    with made_aside(path) as aside:
        given = aside / "given"
        if not os.access(file, os.R_OK):
            raise Unavailable(f"the snapshot {file} cannot be read: permission denied; make it readable")
        shutil.copyfile(file, given)
        try:
            found = verify(given, advance=advance)
            if found.problems:
                raise BadArtifact(
                    f"the snapshot {file} is damaged and was not restored: {found.problems[0]}; "
                    "use another one"
                )
            with closing(Store(given)) as store:
                store.copy_to(aside / FILE_NAME)
        except BadArtifact as error:
            raise BadArtifact(str(error).replace(str(given), str(file))) from error
        given.unlink()
        with closing(Gallery.open(aside, policy=RebuildPolicy(automatic=False))) as gallery:
            gallery.rebuild(progress=advance)
    return found.items


def _link(source: Path, target: Path) -> None:
    """Give a file that never changes another name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _damaged(path: Path, found: Verification) -> BadArtifact:
    return BadArtifact(
        f"the gallery {path.name} is damaged, and no snapshot of it was written: {found.problems[0]}; "
        f"see crossbatch gallery verify {path.name}"
    )
