"""One making of a gallery's index: the published one is added to where that will do, or all is made anew.

Whoever calls holds the gallery's lock. The files are put into the folder that was opened at the beginning,
whatever name it has by then, and named in the store if that still has its name.
"""

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from serving.gallery.index.build import Advance, build_index, measure_again
from serving.gallery.index.candidates import is_small
from serving.gallery.index.draft import Draft
from serving.gallery.index.kind import EXACT, Facts, IndexDamaged
from serving.gallery.index.policy import RebuildPolicy
from serving.gallery.search.columns import Columns, ColumnsDamaged
from serving.gallery.store.schema import FILE_NAME, sound
from serving.gallery.store.store import Store
from serving.gallery.store.transaction import Block, Reader, State

__all__ = ["Renewal"]

_GROWTH = 2  # times the items that an index was built and measured on: then it is built whole again
_DESCRIPTORS = Path("/proc/self/fd")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Made:
    """An index that is ready to be written."""

    draft: Draft
    columns: Columns
    facts: Facts
    covers_removal: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """How the index of a store is made anew.

    Attributes:
        store: The store.
        policy: When an index must be built whole.
        threads: Those of FAISS.
        advance: Told of progress; what it raises ends the work.
    """

    store: Store
    policy: RebuildPolicy
    threads: int
    advance: Advance

    def run(self, *, whole: bool, only_if_due: bool) -> None:
        """Make the index and publish it.

        Args:
            whole: Whether the published one must not be kept or added to.
            only_if_due: Whether to leave it where by now it need not be made.

        Raises:
            OSError: A file cannot be written.
            Replaced: The gallery has lost its name.
            CrossbatchError: The store cannot be read or written.
        """
        with _opened(self.store) as folder:
            older = list(folder.glob("index-*"))  # than what is made here
            with self.store.read() as reader:
                seen = reader.state()
                if only_if_due and not self.policy.is_due(seen):
                    return  # another process was faster
                if not whole and self._is_current(folder, seen):
                    return
                _remove(older, but=seen.index_file)  # what a crash has left: the room may be needed
                made = None if whole else self._extended(folder, seen, reader)
                if made is None:
                    draft, columns = self._read(seen, reader)
            if made is None:
                made = self._whole(draft, columns, seen)
            file = folder / f"index-{seen.last_seq}-{secrets.token_hex(4)}.faiss"
            named = seen.index_file
            try:
                named = self._publish(made, seen, file)
            finally:
                _remove([*older, file, file.with_suffix(".columns")], but=named)

    def _is_current(self, folder: Path, seen: State) -> bool:
        """Tell whether there is nothing to add, nor a reason to build the index whole."""
        try:
            facts = Facts.from_json(seen.index_facts)
        except IndexDamaged:
            return False
        return (
            seen.covers_seq == seen.last_seq
            and (facts.wanted, facts.wanted_recall) == (seen.wanted_index, seen.wanted_recall)
            and not self.policy.is_worn(seen)
            and (folder / seen.index_file).is_file()
        )

    def _whole(self, draft: Draft, columns: Columns, seen: State) -> _Made:
        facts = Facts(wanted=seen.wanted_index, wanted_recall=seen.wanted_recall)
        if len(draft):
            facts = build_index(
                draft, wanted=seen.wanted_index, wanted_recall=seen.wanted_recall, advance=self.advance
            )
            if facts.note or facts.recall < facts.wanted_recall:
                _log.warning(
                    "the index of the gallery %s is of type %s and finds %.4f of the 10 nearest, wanted is "
                    "%.4f%s",
                    self.store.path.parent.name,
                    facts.type,
                    facts.recall,
                    facts.wanted_recall,
                    f" ({facts.note})" if facts.note else "",
                )
        return _Made(draft, columns, facts, seen.last_removal)

    def _read(self, seen: State, reader: Reader) -> tuple[Draft, Columns]:
        draft = Draft(self.store.meta.dimension, threads=self.threads)
        parts = []
        for block in self._blocks(seen, reader, since=0):
            draft.add(block.seqs, block.vectors)
            parts.append(self._columns(block))
        return draft, Columns.joined(parts)

    def _extended(self, folder: Path, seen: State, reader: Reader) -> _Made | None:
        """Return the published index with what is newer; None where it has to be built whole."""
        dimension = self.store.meta.dimension
        if not seen.index_file or self.policy.is_worn(seen):
            return None
        try:
            facts = Facts.from_json(seen.index_facts)
            if (facts.wanted, facts.wanted_recall) != (seen.wanted_index, seen.wanted_recall):
                return None
            blocks = list(self._blocks(seen, reader, since=seen.covers_seq))
            added = sum(len(block.seqs) for block in blocks)
            count = seen.index_count + added
            outgrown = facts.type == EXACT and facts.automatic and is_small(facts.count, dimension)
            if count > _GROWTH * facts.count or (outgrown and not is_small(count, dimension)):
                return None
            file = folder / seen.index_file
            columns = Columns.load(file.with_suffix(".columns"), facts.columns_checksum)
            draft = Draft.read(file, checksum=seen.index_checksum, dimension=dimension, threads=self.threads)
        except (IndexDamaged, ColumnsDamaged):
            return None
        for block in blocks:
            draft.add(block.seqs, block.vectors)
        columns = Columns.joined([columns, *map(self._columns, blocks)])
        after = measure_again(draft, facts, added=added)
        if facts.automatic and after.recall < facts.wanted_recall <= facts.recall:
            return None  # what came is of another kind than what it was chosen for
        return _Made(draft, columns, after, seen.covers_removal)

    def _publish(self, made: _Made, seen: State, file: Path) -> str:
        """Write the files and name them in the store; returns the file that is named there then."""
        checksum, facts = "", made.facts
        if len(made.draft):  # an empty gallery has no index
            self.advance("write", 0, 1)
            facts = replace(facts, columns_checksum=made.columns.save(file.with_suffix(".columns")))
            checksum = made.draft.save(file)
            self.advance("write", 1, 1)
        with self.store.write() as writer:
            writer.publish(
                seen,
                index_file=file.name if checksum else "",
                checksum=checksum,
                count=len(made.draft),
                facts=facts.to_json(),
                covers_removal=made.covers_removal,
            )
            return writer.state().index_file  # of another, where it was faster

    def _blocks(self, seen: State, reader: Reader, *, since: int) -> Iterator[Block]:
        for block in reader.blocks_since(since):
            self.advance("read", int(block.seqs[-1]) - since, seen.last_seq - since)
            yield block

    def _columns(self, block: Block) -> Columns:
        with sound(self.store.path, "the metadata in it"):
            return Columns.of(block.labels, block.metadata)


@contextmanager
def _opened(store: Store) -> Iterator[Path]:
    """Open the store's folder; the path given leads into it even when it has another name by then.

    Where the system has no such paths (macOS), it is the path by name.

    Raises:
        Replaced: The store has lost its name.
    """
    descriptor = os.open(store.path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.stat(FILE_NAME, dir_fd=descriptor)
        if (found.st_dev, found.st_ino) != store.identity:
            store.check_name()
        anchored = _DESCRIPTORS / str(descriptor)
        yield anchored if (anchored / FILE_NAME).exists() else store.path.parent
    finally:
        os.close(descriptor)


def _remove(files: Iterable[Path], *, but: str) -> None:
    """Remove index files but those of the published one.

    A process that has one of them mapped keeps it; one about to open it finds the newer one named. A folder
    of such a name is none of ours; as the names are drawn at random, it is in nobody's way.
    """
    for path in files:
        if (not but or path.stem != Path(but).stem) and not path.is_dir():
            with suppress(FileNotFoundError):
                path.unlink()
