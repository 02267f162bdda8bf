"""Factory strings: what can be an index type, and what is refused in one sentence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InvalidArgument
from serving.gallery.index.factory import check_recall, check_type, full_type

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
    "IVF64,RQ2x4": "IVF64,RQ2x4,RFlat",  # what is not of a common family is tried
}
BAD = {
    "": "printable",
    "x" * 101: "printable",
    "IVF16,Flat\n": "printable",
    "Flät": "printable",
    "bogus": "could not parse",
    "RFlat": "could not parse",
    "Flat,Flat": "could not parse",
    "PQ5": "multiple",
    "IVF16,PQ5x4fs": "multiple",
    "LSH": "inner product",
    "IMI2x4,Flat": "inner product",
    "IDMap,Flat": "leave it out",
    "IDMap2,Flat": "leave it out",
    "NSG16,Flat": "HNSW",
    "PQ0": "0 in it",
    "PQ8x0": "0 in it",
    "HNSW0,Flat": "0 in it",
    "IVF0,Flat": "0 in it",
    "IVF99999999,Flat": "99999999",
    "PQ8x24": "x24",
    "PQ8x16": "x16",
    "IVF1000000,Flat": "1000000",
    "LSQ8x8": "take PQ",
    "HNSW1": "at least 2 links",
    "IVF4_HNSW1,Flat": "at least 2 links",
    "SQ8,Refine(IVF4,Flat)": "dies of it",
    "PQ8x4fs_131072": "not instantiated",
    "IVF16,RQ128x12": "centroids",
    "Pad1000,SQ8": "Pad1000",
    "PLSQ2x4x8": "take PQ",
    "HNSW100000,Flat": "HNSW100000",
    "RR17,Flat": "RR17",
    "PCA17,Flat": "PCA17",
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


@settings(max_examples=40, deadline=None)
@given(st.text("IVFPQHNSWRx,_()0128fslat\n\0é", max_size=12))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        assert check_type(text, dimension=12) == text
    except InvalidArgument as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("recall", [0.0, -0.1, 1.01, float("nan")])
def test_recall_out_of_range_is_refused(recall: float) -> None:
    with pytest.raises(InvalidArgument, match="wanted recall"):
        check_recall(recall)
