"""Making the next FAISS file of a gallery: one process at a time, beside the searches, published at once."""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from serving.cores import lower_priority, usable_cores
from serving.errors import CrossbatchError, Overloaded
from serving.gallery.disk import disk_error, gallery_error
from serving.gallery.index.builder import Advance, GivenUp, IndexBuilder
from serving.gallery.index.choice import build_index, is_small, measure_again
from serving.gallery.index.index import AUTOMATIC, EXACT, IndexDamaged, IndexMetadata
from serving.gallery.lock import alone
from serving.gallery.search.columns import Columns
from serving.gallery.store.schema import sound
from serving.gallery.store.store import Replaced, Store
from serving.gallery.store.transaction import Block, Reader, State

__all__ = ["RebuildPolicy", "Rebuilder"]

_PAUSE = 30.0  # seconds until a background rebuild that failed is tried again
_PATIENCE = 0.5  # seconds
_TURN = 600.0  # seconds that one who asks for a rebuild waits for another's
_GROWTH = 2  # times the items that an index was built and measured on: then it is built whole again

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RebuildPolicy:
    """When the index is made anew without being asked for."""

    least: int = 4096  # changes below which it never is; so many items are searched in a plain matrix
    share: float = 0.1  # the part of the index's items that may have changed before it is
    most: int = 32_768  # new items above which it is, however large the index
    automatic: bool = True  # whether it is at all

    def is_due(self, state: State) -> bool:
        """Tell whether so much is newer than the index, or deleted from it, that searches are slowed."""
        fresh = state.last_seq - state.covers_seq
        return fresh > max(self.least, min(self.most, self.share * state.index_count)) or self.is_worn(state)

    def is_worn(self, state: State) -> bool:
        """Tell whether so much was deleted since the index was built whole that it must be again."""
        removed = state.last_removal - state.covers_removal
        return removed > max(self.least, self.share * state.index_count)


class Rebuilder:
    """Rebuilds one gallery's index, when asked or in a thread of its own."""

    def __init__(self, store: Store, policy: RebuildPolicy) -> None:
        self._store = store
        self._folder = store.path.parent
        self.policy = policy
        self._guard = threading.Lock()  # of the thread and the time below
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self._stopping = threading.Event()

    def consider(self, state: State, *, damaged: bool = False) -> None:
        """Start a rebuild in the background if it is due and none is running."""
        if not self.policy.automatic or not (damaged or self.policy.is_due(state)):
            return
        with self._guard:
            running = self._thread is not None and self._thread.is_alive()
            if running or self._stopping.is_set() or time.monotonic() < self._not_before:
                return
            # A daemon, since a process may end in the middle: what is built aside is then thrown away.
            self._thread = threading.Thread(
                target=self._in_background, args=(damaged,), name=f"rebuild {self._folder.name}", daemon=True
            )
            self._thread.start()

    def run(self, *, whole: bool, progress: Advance) -> None:
        """Bring the index to every item there is and publish it; where it need not be `whole`, by adding.

        Overloaded tells that a rebuild by another does not end, or the disk is full.
        """
        try:
            with alone(self._folder, _TURN, waiting=lambda: progress("wait", 0, 0)):
                making = _Making(self._store, self.policy, self._stopping, usable_cores(), progress)
                making.run(whole=whole)
        except GivenUp as error:
            closed = f"the gallery {self._folder} was closed while its index was made; open it again"
            raise Replaced(closed) from error
        except OSError as error:
            self._store.check_name()  # or the folder is not there because the gallery was dropped
            raise gallery_error(error, self._folder) from error

    def close(self) -> None:
        """Stop the background rebuild; within a long step of FAISS it notices later and publishes nothing."""
        self._stopping.set()
        with self._guard:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _in_background(self, damaged: bool) -> None:
        lower_priority()
        try:
            with alone(self._folder, 0.0):
                _log.info("the index of %s is being rebuilt", self._folder)
                threads = max(1, usable_cores() // 2)
                making = _Making(self._store, self.policy, self._stopping, threads, lambda *_: None)
                making.run(whole=damaged, only_if_due=not damaged)
        except Exception as error:
            if self._stopping.is_set():
                return
            told = disk_error(error, f"the index of {self._folder}") if isinstance(error, OSError) else error
            message = f"the index of {self._folder} was not rebuilt: {told}; searches go on without it"
            if isinstance(error, Overloaded | Replaced):
                _log.info(message)  # most often another process is at it
            elif isinstance(told, CrossbatchError):
                _log.warning(message)
            else:
                _log.exception(message)
            with self._guard:
                self._not_before = time.monotonic() + _PAUSE


_Made = tuple[IndexBuilder, Columns, IndexMetadata, int]  # the last: the last removal that it covers


@dataclass(frozen=True, slots=True)
class _Making:
    """One making of an index, by whoever holds the gallery's lock."""

    store: Store
    policy: RebuildPolicy
    stopping: threading.Event
    threads: int  # of FAISS
    progress: Advance

    def advance(self, stage: str, done: int, total: int) -> None:
        """Tell how far it is; GivenUp where it is to stop."""
        if self.stopping.is_set():
            raise GivenUp
        self.progress(stage, done, total)

    def run(self, *, whole: bool, only_if_due: bool = False) -> None:
        """Add to the published index, where that will do and it need not be `whole`, or make all anew."""
        self.store.check_name()
        folder, began = self.store.path.parent, time.monotonic()
        older = list(folder.glob("index-*"))  # than what is made here
        with self.store.read() as reader:
            seen = reader.state()
            if only_if_due and not self.policy.is_due(seen):
                return  # another process was faster
            known = None if whole else self._still_wanted(seen)
            if known and seen.covers_seq == seen.last_seq and (folder / seen.index_file).is_file():
                return
            _remove(older, but=seen.index_file)  # what a crash has left: the room may be needed
            made = self._extended(seen, known, reader) if known and seen.index_file else None
            if made is None:
                builder, parts = IndexBuilder(self.store.meta.dimension, threads=self.threads), []
                for block, columns in self._blocks(seen, reader, since=0):
                    builder.add(block.seqs, block.vectors)
                    parts.append(columns)
        if made is None:
            made = builder, Columns.joined(parts), self._built(builder, seen), seen.last_removal
        file = folder / f"index-{seen.last_seq}-{secrets.token_hex(4)}.faiss"
        named = seen.index_file
        try:
            named = self._publish(made, seen, file)
            _log.info("the index of %s is rebuilt after %.1f s", folder, time.monotonic() - began)
        finally:
            _remove([*older, file, file.with_suffix(".columns")], but=named)

    def _still_wanted(self, seen: State) -> IndexMetadata | None:
        """Return the metadata of what is published; None where it has to be built whole."""
        try:
            known = IndexMetadata.from_json(seen.index_facts)
        except IndexDamaged:
            return None
        same = (known.wanted, known.wanted_recall) == (seen.wanted_index, seen.wanted_recall)
        return known if same and not self.policy.is_worn(seen) else None

    def _built(self, builder: IndexBuilder, seen: State) -> IndexMetadata:
        wanted, recall = seen.wanted_index, seen.wanted_recall
        if not len(builder):
            return IndexMetadata(wanted=wanted, wanted_recall=recall)
        found = build_index(builder, wanted=wanted, wanted_recall=recall, advance=self.advance)
        if found.note or found.recall < recall:
            name, note = self.store.path.parent.name, f" ({found.note})" if found.note else ""
            reached = f"finds {found.recall:.4f} of the 10 nearest, wanted {recall:.4f}{note}"
            _log.warning(f"the index of the gallery {name} is of type {found.type} and {reached}")
        return found

    def _extended(self, seen: State, known: IndexMetadata, reader: Reader) -> _Made | None:
        """Return the published index with what is newer; None where it has to be built whole."""
        dimension, file = self.store.meta.dimension, self.store.path.parent / seen.index_file
        blocks = list(self._blocks(seen, reader, since=seen.covers_seq))
        added = sum(len(block.seqs) for block, _ in blocks)
        count = seen.index_count + added
        automatic = known.wanted == AUTOMATIC
        small = automatic and known.type == EXACT and is_small(known.count, dimension)
        if count > _GROWTH * known.count or (small and not is_small(count, dimension)):
            return None
        try:
            columns = Columns.load(file.with_suffix(".columns"), known.columns_checksum)
            builder = IndexBuilder.read(
                file, checksum=seen.index_checksum, dimension=dimension, threads=self.threads
            )
        except IndexDamaged:
            return None
        for block, _ in blocks:
            builder.add(block.seqs, block.vectors)
        columns = Columns.joined([columns, *(newer for _, newer in blocks)])
        after = measure_again(builder, known, added=added)
        if automatic and after.recall < known.wanted_recall <= known.recall:
            return None  # what came is of another kind than what it was chosen for
        return builder, columns, after, seen.covers_removal

    def _publish(self, made: _Made, seen: State, file: Path) -> str:
        """Write the files and name them in the store; returns the file that is named there then."""
        (builder, columns, metadata, covers_removal), checksum = made, ""
        if len(builder):  # an empty gallery has no index
            self.advance("write", 0, 1)
            metadata = replace(metadata, columns_checksum=columns.save(file.with_suffix(".columns")))
            checksum = builder.save(file)
            self.advance("write", 1, 1)
        with self.store.write() as writer:
            writer.publish(
                seen,
                index_file=file.name if checksum else "",
                checksum=checksum,
                count=len(builder),
                facts=metadata.to_json(),
                covers_removal=covers_removal,
            )
            return writer.reader.state().index_file  # of another, where it was faster

    def _blocks(self, seen: State, reader: Reader, *, since: int) -> Iterator[tuple[Block, Columns]]:
        for block in reader.blocks_since(since):
            self.advance("read", int(block.seqs[-1]) - since, seen.last_seq - since)
            with sound(self.store.path, "the metadata in it"):
                columns = Columns.of(block.labels, block.metadata)
            yield block, columns


def _remove(files: Iterable[Path], *, but: str) -> None:
    """Remove index files but those of the published one; who has one of them mapped keeps it."""
    for path in files:
        if (not but or path.stem != Path(but).stem) and not path.is_dir():
            with suppress(FileNotFoundError):
                path.unlink()
