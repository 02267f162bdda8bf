"""milvus-lite: a collection with an HNSW index in a file of its own, asked through pymilvus."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient

from benchmarks.contenders.contender import Built, key_of, shard_of

__all__ = ["make"]

_BLOCK = 5_000
_NAME = "items"


class MilvusLiteFile:
    """A collection of number, key, shard and vector."""

    ladder = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320, 448, 640)

    def __init__(self, folder: Path) -> None:
        self._path = folder / "milvus.db"
        self._client: MilvusClient | None = None
        self._ef = self.ladder[0]

    def build(self, vectors: NDArray[np.float32]) -> Built:
        client = self._client = MilvusClient(str(self._path))
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("number", DataType.INT64, is_primary=True)
        schema.add_field("key", DataType.VARCHAR, max_length=64)
        schema.add_field("shard", DataType.INT64)
        schema.add_field("place", DataType.FLOAT_VECTOR, dim=vectors.shape[1])
        client.create_collection(_NAME, schema=schema)
        started = time.perf_counter()
        self._insert(0, vectors)
        client.flush(_NAME)
        loaded = time.perf_counter()
        indexes = client.prepare_index_params()
        indexes.add_index(
            "place", index_type="HNSW", metric_type="IP", params={"M": 16, "efConstruction": 200}
        )
        client.create_index(_NAME, indexes)
        client.load_collection(_NAME)
        self.search(np.asarray(vectors[:1]), 1, None)
        return Built(loaded - started, time.perf_counter() - loaded, "HNSW, M 16, efConstruction 200")

    def open(self) -> None:
        self._client = MilvusClient(str(self._path))
        self._client.load_collection(_NAME)

    def set(self, value: int) -> None:
        self._ef = value

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        assert self._client is not None
        found = self._client.search(
            _NAME,
            data=list(queries),
            anns_field="place",
            limit=k,
            filter="" if below is None else f"shard < {below}",
            search_params={"metric_type": "IP", "params": {"ef": self._ef}},
            output_fields=["number", "key"],
        )
        return [[hit["entity"]["number"] for hit in hits] for hits in found]

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        assert self._client is not None
        self._insert(first, vectors)
        for start in range(0, len(deleted), _BLOCK):
            self._client.delete(_NAME, ids=list(deleted[start : start + _BLOCK]))

    def servers(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _insert(self, first: int, vectors: NDArray[np.float32]) -> None:
        assert self._client is not None
        for start in range(0, len(vectors), _BLOCK):
            rows = [
                {"number": number, "key": key_of(number), "shard": shard_of(number), "place": vector}
                for number, vector in enumerate(np.asarray(vectors[start : start + _BLOCK]), first + start)
            ]
            self._client.insert(_NAME, rows)


def make(folder: Path, argument: str) -> MilvusLiteFile:
    """Return the contender."""
    return MilvusLiteFile(folder)
