"""What of a gallery is in memory: its newest snapshot, brought to the state of each read transaction."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import Overloaded
from serving.gallery.at_hand import NotAtHand
from serving.gallery.index.index import Index
from serving.gallery.index.metadata import IndexDamaged, IndexMetadata
from serving.gallery.search.columns import Columns, ColumnsDamaged
from serving.gallery.search.covered import Covered
from serving.gallery.search.snapshot import Snapshot, load_snapshot
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import Reader, State

__all__ = ["View"]

_PATIENCE = 10.0  # seconds to wait for the index that another caller loads

_log = logging.getLogger(__name__)


class View:
    """Snapshots of one store; every method may be called from several threads at once."""

    def __init__(self, store: Store, consider: Callable[[Snapshot], None], *, device: str = "cpu") -> None:
        """Read `store`, show each snapshot that is used to `consider`, and search on `device`."""
        self._store = store
        self._device = device
        self._consider = consider
        self._guard = threading.Lock()  # of the two fields below
        self._snapshot: Snapshot | None = None
        self._retired = False
        self._loading = threading.Lock()  # held by the one caller that loads an index

    @contextmanager
    def open(self, *, at_once: bool = False) -> Iterator[tuple[Snapshot, Reader]]:
        """Begin a read transaction and bring the snapshot to the state that it sees.

        Raises:
            NotAtHand: That would take time, and it is to be `at_once`.
        """
        while True:
            with self._store.read() as reader:
                snapshot = self._at_hand(reader) if at_once else self._current(reader)
                if snapshot is not None:
                    self._consider(snapshot)
                    yield snapshot, reader
                    return

    def retire(self) -> None:
        """Keep nothing in memory from now on."""
        with self._guard:
            self._retired, self._snapshot = True, None

    def _at_hand(self, reader: Reader) -> Snapshot:
        """Return the snapshot in memory, if it is of the reader's state and nobody has to be waited for."""
        if not self._guard.acquire(blocking=False):
            raise NotAtHand
        try:
            state, known = reader.state(), self._snapshot
        finally:
            self._guard.release()
        if known is None or known.state.change != state.change or known.generation != state.generation:
            raise NotAtHand
        return known

    def _current(self, reader: Reader) -> Snapshot | None:
        """Return the snapshot of the reader's state; None if it is to look again in a new transaction.

        A newly published index is loaded by one caller, outside the lock, since verifying it takes long. The
        others go on with the index before it, brought to their own state, so that they miss no write.
        """
        with self._guard:
            # The state is read under the lock, so that it is never older than the snapshot.
            state = reader.state()
            known = self._followed(state, reader)
            if known is not None:
                self._keep(known)
                if known.generation == state.generation or not self._loading.acquire(blocking=False):
                    return known
        if known is None and not self._loading.acquire(timeout=_PATIENCE):
            raise Overloaded(
                f"the index of {self._store.path.parent} is being loaded for a long time; try again",
                retry_after=1.0,
            )
        try:
            with self._guard:
                newest = self._snapshot
            if newest is not known and newest is not None and newest.generation >= state.generation:
                return None  # somebody else has loaded it in the meantime
            loaded = self._loaded(state, reader)
            if loaded is not None:
                with self._guard:
                    self._keep(loaded)  # others may be at a later state by now: they catch up again
            return loaded
        finally:
            self._loading.release()

    def _followed(self, state: State, reader: Reader) -> Snapshot | None:
        """Return the snapshot in memory brought to a state, or None where it cannot follow that far."""
        known = self._snapshot
        if known is None or known.state.change > state.change:  # an older file was put in this one's place
            return None
        if known.state.change == state.change:
            return known
        return known.advanced(state, reader) if known.follows(state) else None

    def _keep(self, snapshot: Snapshot) -> None:
        if not self._retired:
            self._snapshot = snapshot

    def _loaded(self, state: State, reader: Reader) -> Snapshot | None:
        """Return the snapshot of another generation, or None if a newer one was published meanwhile."""
        covered, damaged = None, False
        if state.index_file:
            file = self._store.path.parent / state.index_file
            try:
                covered = self._covered(state, file)
            except (IndexDamaged, ColumnsDamaged) as error:
                self._store.check_name()  # or the file was looked for in another gallery
                with self._store.read() as newer:
                    if newer.state().generation != state.generation:
                        return None
                _log.warning(
                    "the index of the gallery %s is made anew from its store: %s", file.parent.name, error
                )
                damaged = True
        return load_snapshot(
            state,
            reader,
            path=self._store.path,
            dimension=self._store.meta.dimension,
            covered=covered,
            damaged=damaged,
        )

    def _covered(self, state: State, file: Path) -> Covered:
        facts = IndexMetadata.from_json(state.index_facts)
        index = Index(
            file,
            checksum=state.index_checksum,
            dimension=self._store.meta.dimension,
            facts=facts,
            device=self._device,
        )
        columns = Columns.load(file.with_suffix(".columns"), facts.columns_checksum)
        if len(columns) != len(index):
            raise ColumnsDamaged(f"{file} has {len(index)} items and the columns beside it {len(columns)}")
        return Covered(index, columns)
