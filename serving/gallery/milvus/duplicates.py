"""Pairs of items of a collection that are nearly alike, and the clusters that they make."""

import numpy as np

from serving.gallery.index.builder import Advance
from serving.gallery.milvus.expression import ALWAYS
from serving.gallery.milvus.reader import DIGITS, PAGE, Reader, as_cosine
from serving.gallery.search.duplicates import NEAREST, Duplicate, DuplicatesPage, clustered

__all__ = ["duplicates", "duplicates_page"]


def duplicates(reader: Reader, above: float, advance: Advance) -> list[Duplicate]:
    """Find the pairs that score at least `above`, by cluster, best first."""
    pairs, last = dict[tuple[str, str], float](), 0
    while True:
        page = duplicates_page(reader, above, last, PAGE, advance)
        pairs |= {(min(one, other), max(one, other)): score for one, other, score in page.pairs}
        last = page.last
        if not last:
            break
    keys = sorted({key for pair in pairs for key in pair})
    labels = {row["key"]: row["label"] for row in reader.of_keys(keys, ["key", "label"])}
    return clustered([(*pair, score) for pair, score in pairs.items() if labels.keys() >= {*pair}], labels)


def duplicates_page(reader: Reader, above: float, after: int, limit: int, advance: Advance) -> DuplicatesPage:
    """Find the pairs of the first `limit` items, by version, of those above `after`, likewise."""
    count, rows = reader.count(), reader.next_versions(ALWAYS, after)[:limit]
    items = list(reader.items([key for _, key in rows]).values())
    if not items:
        return DuplicatesPage([], count, count, 0)
    last = rows[-1][0]
    compared = reader.count(f"version <= {last}")
    advance("compare", compared, count)
    near = reader.near(np.stack([item.vector for item in items]), NEAREST + 1, "", ["version"])
    pairs = dict[tuple[str, str], tuple[str, str, float]]()
    for item, hits in zip(items, near, strict=True):
        for hit in hits:
            key, score = hit["key"], round(as_cosine(hit["score"]), DIGITS)
            if key != item.key and score >= above:  # the older one comes first, if it was compared
                pair = (key, item.key) if after < hit["version"] < item.version else (item.key, key)
                pairs[min(pair), max(pair)] = (*pair, score)
    ranked = sorted(pairs.values(), key=lambda pair: (-pair[2], pair[0], pair[1]))
    return DuplicatesPage(ranked, compared, count, last if compared < count else 0)
