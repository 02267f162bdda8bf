"""What a search tells of the items that it found."""

from collections.abc import Sequence

from serving.gallery.item import Neighbour
from serving.gallery.search.snapshot import Snapshot
from serving.gallery.store.transaction import Reader

__all__ = ["neighbours"]


def neighbours(
    snapshot: Snapshot,
    reader: Reader,
    found: Sequence[list[tuple[int, float]]],
    k: int,
    *,
    by_label: bool,
    vectors: bool,
    thumbnails: bool,
) -> list[list[Neighbour]]:
    """Return the best k of what was found for each query, seqs and scores: ties in the order of their keys.

    With `by_label` it is the best of each label; one without stands for itself.
    """
    rows = snapshot.rows.find({seq for near in found for seq, _ in near}, reader)
    units = {seq: snapshot.vector(seq) for seq in rows} if vectors else {}
    pictures = {seq: reader.thumbnail(row[0]) for seq, row in rows.items()} if thumbnails else {}
    answers = []
    for near in found:
        ranked = sorted(near, key=lambda each: (-each[1], rows[each[0]][0]))
        if by_label:
            first: dict[str | int, tuple[int, float]] = {}
            for seq, score in ranked:
                first.setdefault(rows[seq][1] or seq, (seq, score))
            ranked = list(first.values())
        # A score is a cosine, though vectors are of unit length but for rounding.
        cut = [(i, max(-1.0, min(1.0, score))) for i, score in ranked[:k]]
        answers.append([Neighbour(*rows[i], s, i, units.get(i), pictures.get(i, b"")) for i, s in cut])
    return answers
