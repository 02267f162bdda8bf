"""What a gallery on Milvus does otherwise than one in a folder: the tests read it, the docs print it."""

from serving.gallery.milvus.expression import COMPARED
from serving.gallery.milvus.server import MAX_TERMS, WINDOW

__all__ = ["DIFFERENCES", "MOST_COUNTED"]

MOST_COUNTED = 50_000
"""Most items of a gallery whose fields and values are counted, as each of them is read for it."""

DIFFERENCES = {
    "expected versions": "A write that expects a version is refused: Milvus cannot compare and set. An "
    "update reads the items and then writes them, so of two at once the later one wins.",
    "all or none": "A write of many items is stored in parts; one that fails may have stored some of "
    "them. Send it again.",
    "one state": "A call that reads in several steps may see a write in between.",
    "what is new": "What was written in the last minutes, Milvus searches by a temporary index that misses "
    "some of it, and most where items were written again and again, until it is sealed (as at the end of "
    "`index`, `import` and `copy`) and indexed. Let a Milvus whose items clients write compare all, by "
    "`queryNode.segcore.interimIndex.enableIndex: false` in its settings. Milvus 2.3 may for a moment count "
    "the old rows of items that are written again, and a search then lack others.",
    "versions": "Versions are times of the clock of whoever writes, in nanoseconds.",
    "thumbnails": "None are kept.",
    "map": "There is no map.",
    "index": "Milvus builds its own (HNSW) and brings it up to date; no type or recall can be asked for, and "
    "none is measured.",
    "ties": "Of items that score the same as the last of the k, any may be a hit.",
    "window": f"A search sees the {WINDOW:,} items nearest to a query. Behind them it finds no "
    "other label with `group_by_label`, and nothing in place of items that are left out.",
    "kinds": "A filter that compares a field with a kind of value that no item holds there is refused only "
    "where it finds nothing.",
    "lists in ranges": "A range with two bounds holds for a list whose smallest value is below the upper one "
    "and whose largest is above the lower one, though none may lie between.",
    "long strings in ranges": f"A range compares the first {COMPARED} characters of a string.",
    "many values": f"An item takes {MAX_TERMS:,} different values, kinds and names of fields at most, "
    "and 64 KiB of what ranges ask for: some 900 numbers, or 120 texts of 256 characters.",
    "whole numbers": "Whole numbers in the metadata that need more than 64 bits are refused.",
    "counting": f"The fields and values of a gallery of more than {MOST_COUNTED:,} items are not counted.",
    "switch": "It is one step for whoever reads under the name; the gallery before gets the other name "
    "a moment later. A write that is under way may still reach the gallery that had the name.",
    "milvus-lite": "Its folder belongs to one process, and it promises no durability: for trials and tests.",
}
"""Sentences, by what they are about."""
