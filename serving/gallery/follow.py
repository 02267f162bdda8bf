"""Following: a gallery that is fetched anew, as a whole, whenever its writer has published it (`publish`).

The next generation is put beside the one that is served, and takes its name in one step (`folder`). The one
before lies at NAME.before-<generation> until the one after that has come.
"""

import logging
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from serving.cores import lower_priority
from serving.errors import AlreadyExists, BadArtifact, CrossbatchError, Mismatch, ModelMismatch
from serving.gallery.folder import drop_gallery, made_aside, take_name
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.index.builder import Advance
from serving.gallery.note import NOTE_NAME, Note, read_note, write_note
from serving.gallery.publish import Manifest, copy_hashed
from serving.gallery.store.schema import FILE_NAME
from serving.gallery.store.store import Store
from serving.observability.logs import configure_logs, flush_logs

__all__ = ["follow", "repeat"]

_SWITCH = 60.0  # seconds that a switch waits for whoever works on the gallery
_MOST_PAUSE = 60.0  # seconds

_log = logging.getLogger(__name__)


def follow(
    path: Path,
    folder: Path,
    *,
    any_model: bool = False,
    older: bool = False,
    advance: Advance = lambda *_: None,
) -> tuple[Manifest, bool]:
    """Let the gallery at `path` be the newest that a folder has; returns whether it was another before.

    Only one process may do so. Whatever is raised, the gallery is whole, of the generation before or of this
    one. Without `any_model` one of another model is refused, and without `older` one that is not newer.
    """
    manifest = Manifest.read(folder, path.name)
    for left in path.parent.glob(f".{path.name}.before-*.new-*"):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
    before = path.with_name(f"{path.name}.before-{manifest.generation}")
    note, made = read_note(path), read_note(before)
    new = note is None or note.id != manifest.id
    if note is None:
        if (path / FILE_NAME).exists():
            raise AlreadyExists(
                f"the gallery {path.name} in {path.parent} follows nobody, and what is fetched would replace "
                "it; give it another name first, or follow in another folder of galleries"
            )
        note = _fetch(path, folder, manifest, advance)
    elif new:
        ready = made if made is not None and made.id == manifest.id else None
        _check(path, note, ready, manifest, any_model=any_model, older=older)
        if made is not None and ready is None:
            drop_gallery(before)
        note = ready or _fetch(before, folder, manifest, advance)
        take_name(path, before, timeout=_SWITCH)
    confirmed = replace(note, time=manifest.time.isoformat(), served=True)
    if confirmed != note:
        write_note(path, confirmed)
    for each in path.parent.glob(f"{path.name}.before-*"):
        is_generation = each.name.removeprefix(f"{path.name}.before-").isdecimal()
        if is_generation and each != before and (each / NOTE_NAME).exists():  # damaged or not
            drop_gallery(each)
    return manifest, new


def repeat(work: Callable[[], str], every: float) -> NoReturn:
    """Do work again and again, until SIGTERM or Ctrl-C, and log what it says and what it raises.

    After one that failed the pause is twice as long as the one before, up to a minute.
    """
    lower_priority()  # the server goes first
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the first process of a container stays
    configure_logs()
    pause = every
    try:
        while True:
            try:
                if told := work():
                    _log.info(told)
                pause = every
            except CrossbatchError as error:
                pause = max(every, min(2 * pause, _MOST_PAUSE))
                _log.warning("%s; the next try is in %.0f s", error, pause)
            time.sleep(pause)
    finally:
        flush_logs()


def _check(
    path: Path, note: Note, ready: Note | None, manifest: Manifest, *, any_model: bool, older: bool
) -> None:
    """Raise Mismatch for a generation that is not to take the name."""
    told = f"generation {manifest.generation} of the gallery {path.name}"
    if not older and ready is not None and ready.served:
        raise Mismatch(f"{told} was rolled back here; the next one is taken, or by --older this one again")
    if not older and manifest.generation <= note.generation:
        raise Mismatch(
            f"the newest in the folder is {told}, and generation {note.generation} is served here; look at "
            "what publishes there, or take it all the same by --older"
        )
    with closing(Store(path / FILE_NAME)) as store:
        ours = store.meta
    if not any_model and manifest.fingerprint != ours.fingerprint:
        raise ModelMismatch(
            f"{told} is of the model {manifest.model_name} (fingerprint {manifest.fingerprint[:12]}), and "
            f"the one served here of {ours.model_name} (fingerprint {ours.fingerprint[:12]}); load the new "
            "model into the server beside the old one, then take the generation by --any-model"
        )


def _fetch(path: Path, folder: Path, manifest: Manifest, advance: Advance) -> Note:
    """Make a gallery of the newest generation; whole, or not at all."""
    facts = (manifest.host, manifest.generation, manifest.id, manifest.time.isoformat())
    note = Note(str(folder), *facts, served=False)
    with made_aside(path) as aside:
        for done, (name, file) in enumerate(manifest.files.items()):
            advance("fetch", done, len(manifest.files))
            source = manifest.home(folder) / name
            found = copy_hashed(source, aside / name, most=file.bytes)
            if found != file:
                raise BadArtifact(
                    f"{source} is not what was published, or not all of it: {found.bytes:,} bytes of SHA-256 "
                    f"{found.sha256[:12]}, expected {file.bytes:,} of {file.sha256[:12]}; it is left"
                )
        write_note(aside, note)
        with closing(Gallery.open(aside, policy=RebuildPolicy(automatic=False))) as gallery:
            if gallery.meta.fingerprint != manifest.fingerprint:
                raise BadArtifact(
                    f"{manifest.home(folder)} is of the model {gallery.meta.model_name}, and the manifest "
                    f"says {manifest.model_name} (another fingerprint); look at what publishes there"
                )
    return note
