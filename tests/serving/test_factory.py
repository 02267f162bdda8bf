"""Index types: what can be one, what is refused in one sentence, and what is noted of one that was built."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidArgument
from serving.gallery.index.choice import INDEX_TYPES, check_type, full_type
from serving.gallery.index.index import IndexDamaged, IndexMetadata, Trial

GOOD = {
    "exact": "exact",
    "Flat": "exact",
    "PQ8x4fs,RFlat": "PQ8x4fs,RFlat",
    "PQ8x4fs": "PQ8x4fs,RFlat",
    "HNSW16,SQ8": "HNSW16,SQ8,RFlat",
    "HNSW16,Flat": "HNSW16,Flat",
    "IVF16,Flat": "IVF16,Flat,RFlat",
    "IVF16_HNSW8,PQ8x4fs,RFlat": "IVF16_HNSW8,PQ8x4fs,RFlat",
    "PQ4,Refine(SQ8)": "PQ4,Refine(SQ8),RFlat",
    "PQ4,Refine(Flat)": "PQ4,Refine(Flat)",
    "OPQ4_8,PQ4": "OPQ4_8,PQ4,RFlat",
    "PCA8,SQ8": "PCA8,SQ8,RFlat",
    "SQbf16": "SQbf16,RFlat",
}
NONE = ["", "x" * 101, "IVF16,Flat\n", "Flät", "PQ٤", "bogus", "RFlat", "IDMap,Flat", "PQ8x24"]
NONE += ["LSQ8x8", "SQ8,Refine(IVF4,Flat)"]  # the one trains for hours, and FAISS dies of the other
BAD = dict.fromkeys(NONE, "expected HNSW with") | {
    "PQ5": "multiple",
    "IVF16,PQ5x4fs": "multiple",
    "PQ0": "PQ0 in it is not within 1 to",
    "HNSW0,Flat": "HNSW0 in it is not within 2 to 512",
    "HNSW1": "HNSW1",
    "IVF4_HNSW1,Flat": "HNSW1",
    "HNSW100000,Flat": "HNSW100000",
    "IVF0,Flat": "IVF0",
    "IVF1000000,Flat": "IVF1000000",
    "PCA17,Flat": "PCA17 in it is not within 1 to 16",
    "OPQ4_17,PQ4": "_17 in it is not within 1 to 16",
}


@pytest.mark.parametrize("wanted", GOOD)
def test_exact_vectors_are_added_where_they_are_missing(wanted: str) -> None:
    assert full_type(wanted, dimension=16) == GOOD[wanted]
    assert full_type(GOOD[wanted], dimension=16) == GOOD[wanted]
    assert check_type(wanted, dimension=16) == wanted
    assert check_type("auto", dimension=16) == "auto"


@pytest.mark.parametrize("wanted", BAD)
def test_what_cannot_work_is_refused_with_the_reason(wanted: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be the type of this gallery's index") as caught:
        check_type(wanted, dimension=16)
    text = str(caught.value)
    assert BAD[wanted] in text
    assert "\n" not in text
    assert "/project/" not in text


@settings(max_examples=40)
@given(st.text("IVFPQHNSWRx,_()0128fslat\n\0é", max_size=12))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        assert check_type(text, dimension=12) == text
    except InvalidArgument as error:
        assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=25)
@given(dimension=st.integers(1, 600), count=st.sampled_from([1500, 300_000]))
def test_the_types_that_are_chosen_from_fit_any_dimension(dimension: int, count: int) -> None:
    for each in INDEX_TYPES:
        type_ = each.factory_string(dimension, count)
        assert full_type(type_, dimension=dimension) == type_


def test_metadata_that_is_written_is_read() -> None:
    trials = (Trial("exact", 1.0, 2.0, 0.0), Trial("HNSW16,SQ8,RFlat", 0.99, 0.2, 1.5))
    numbers: dict[str, Any] = {"wanted_recall": 0.98, "recall": 0.991, "queries": 200, "latency_ms": 0.25}
    numbers |= {"count": 1000, "build_seconds": 3.5, "extended": 7, "parameters": {"efSearch": 64}}
    metadata = IndexMetadata(type="HNSW16,SQ8,RFlat", trials=trials, note="why", **numbers)
    assert IndexMetadata.from_json(metadata.to_json()) == metadata
    assert IndexMetadata.from_json("{}") == IndexMetadata()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "[" * 10_000, '{"other": 1}', '{"type": 1}', '{"count": "1"}', '{"trials": [1]}']
    + [json.dumps({field.name: None}) for field in dataclasses.fields(IndexMetadata)],
)
def test_any_other_metadata_is_damage(text: str) -> None:
    with pytest.raises(IndexDamaged, match="cannot be read"):
        IndexMetadata.from_json(text)
