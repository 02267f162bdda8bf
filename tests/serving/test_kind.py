"""The facts of an index: what is written is read, and nothing else is."""

import dataclasses
import json

import pytest

from serving.gallery.index.kind import Facts, IndexDamaged, Trial

FACTS = Facts(
    type="HNSW16,SQ8,RFlat",
    wanted="auto",
    wanted_recall=0.98,
    recall=0.991,
    queries=200,
    latency_ms=0.25,
    parameters={"efSearch": 64, "k_factor_rf": 2},
    trials=(Trial("exact", 1.0, 2.0, 0.0), Trial("HNSW16,SQ8,RFlat", 0.99, 0.2, 1.5)),
    note="why",
    count=1000,
    build_seconds=3.5,
    extended=7,
    columns_checksum="0" * 64,
)


def test_what_is_written_is_read() -> None:
    assert Facts.from_json(FACTS.to_json()) == FACTS
    assert Facts.from_json("{}") == Facts()
    assert FACTS.automatic
    assert not dataclasses.replace(FACTS, wanted="exact").automatic


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"other": 1}',
        '{"type": 1}',
        '{"count": "1"}',
        '{"trials": [1]}',
        '{"trials": 3}',
    ]
    + [json.dumps({field.name: None}) for field in dataclasses.fields(Facts)],
)
def test_anything_else_is_damage(text: str) -> None:
    with pytest.raises(IndexDamaged, match="facts"):
        Facts.from_json(text)
