"""A Milvus server: where it is, what is asked of it, and what its errors mean.

Only this file imports pymilvus.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving import errors
from serving.errors import CrossbatchError, Unavailable, cause_of
from serving.gallery.address import TOKEN, milvus_address
from serving.gallery.item import MAX_KEY_BYTES, MAX_URI_BYTES

__all__ = ["MAX_JSON_BYTES", "MAX_TERMS", "TERM_LENGTH", "WINDOW", "Collection", "Gone", "Server"]

WINDOW = 16_384
"""Most rows that a query, or one query of a search, can return."""
MAX_JSON_BYTES = 65_536
MAX_TERMS = 4_096
TERM_LENGTH = 24
_BUILD = {"M": 16, "efConstruction": 200}
_LEAST_BREADTH, _MOST_BREADTH = 256, 32_768  # candidates that a search keeps of the graph
_STRONG = "Strong"  # every read sees every write that was confirmed before
# A server that was away is tried again each second: gRPC alone would wait for up to two minutes. No pings are
# sent while there are no calls: pymilvus' many make a server, or what is before it, end the connection.
_CHANNEL = {
    "grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.keepalive_permit_without_calls": 0,
}  # fmt: skip
_CONNECT = 2.0  # seconds to wait for a connection
_PAUSE = 0.05  # seconds until a call is tried anew, twice as long each time

T = TypeVar("T")


class Gone(errors.NotFound):
    """The collection is not there, or not any more."""


class _Passing(Unavailable):
    """What may be over in a moment."""


class _Unloaded(_Passing):
    """The collection is not in memory, as after milvus-lite was started again."""


_LOCKED = (
    errors.Unauthenticated,
    f"does not accept what is in {TOKEN} ({{}}); set it to USER:PASSWORD or an API key",
)
_FORBIDDEN = errors.PermissionDenied, f"does not allow this ({{}}); grant it to the user of {TOKEN}"
_FULL = errors.Overloaded, "has no room for this ({}); try again later"
_NO_SUCH = Gone, "holds no such collection ({})"
_TAKEN = errors.AlreadyExists, "has something of that name ({})"
_AWAY = Unavailable, "cannot be reached ({}); see that it runs, and try again"
_NOT_READY = _Passing, "is not ready ({}); try again"
_OTHERS = Unavailable, "cannot do this ({}); its log may tell more"
_ERRORS: dict[str | int, tuple[type[CrossbatchError], str]] = {
    "UNAUTHENTICATED": _LOCKED, "PERMISSION_DENIED": _FORBIDDEN, "RESOURCE_EXHAUSTED": _FULL,
    "UNAVAILABLE": _AWAY, 2: _AWAY,
    "DEADLINE_EXCEEDED": (errors.DeadlineExceeded, "did not answer in time ({}); try again"),
    # Numbers of Milvus' own: pkg/util/merr in its source.
    100: _NO_SUCH, 101: (_Unloaded, "does not hold the gallery in memory ({}); try again"),
    1400: _LOCKED, 1401: _FORBIDDEN, 1600: _NO_SUCH, 1601: _TAKEN, 1602: _TAKEN,
    **dict.fromkeys((3, 4, 7, 8, 9), _FULL),
    **dict.fromkeys((103, 106, 400, 401, 500, 501, 502, 503, 600, 901, 902, 903, 904, 905), _NOT_READY),
}  # fmt: skip


class Collection(NamedTuple):
    """A collection as it is now; `dimension` is 0 where it has no vectors of ours."""

    name: str
    properties: Mapping[str, str]
    dimension: int


class Server:
    """A connection to a Milvus server, thread-safe; each call ends within some seconds, with our errors.

    Calls that can be repeated (all but making a collection) are, where the server is restarted or not ready.
    """

    def __init__(self, address: str, *, timeout: float) -> None:
        """Connect to the server at milvus://HOST:PORT; BadSetting: that is no address, or pymilvus lacks."""
        self.address, self._timeout = milvus_address(address), timeout
        try:
            import pymilvus
        except ImportError as error:
            raise errors.BadSetting(
                f"pymilvus, which speaks to Milvus, cannot be loaded ({error}); "
                "install it by: pip install 'crossbatch[milvus]'"
            ) from error
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs what it raises, with a traceback
        self._types = pymilvus.DataType
        given: dict[str, Any] = {"token": os.environ.get(TOKEN, ""), "timeout": _CONNECT}
        uri = self.address.replace("milvus", "http", 1)  # milvuss:// is https://
        self._client = self._told(lambda: pymilvus.MilvusClient(uri, **given, grpc_options=_CHANNEL))

    def close(self) -> None:
        """Close the connection."""
        self._told(self._client.close)

    def aliases(self, collection: str = "") -> list[str]:
        """Return the aliases that there are, or those of a collection."""
        return list(self._call(self._client.list_aliases, collection)["aliases"])

    def describe(self, name: str) -> Collection:
        """Return what a name or an alias stands for; Gone where there is none."""
        found = self._call(self._client.describe_collection, name)
        dimensions = [field["params"].get("dim", 0) for field in found["fields"] if field["name"] == "vector"]
        return Collection(found["collection_name"], found.get("properties") or {}, *(dimensions or [0]))

    def create(self, name: str, dimension: int, properties: Mapping[str, str]) -> None:
        """Make a collection for items of ours, ready to be searched."""
        types, text = self._types, self._types.VARCHAR
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", text, is_primary=True, max_length=MAX_KEY_BYTES)
        schema.add_field("vector", types.FLOAT_VECTOR, dim=dimension)
        schema.add_field("label", text, max_length=MAX_KEY_BYTES)
        schema.add_field("uri", text, max_length=MAX_URI_BYTES)
        schema.add_field("metadata", types.JSON)
        schema.add_field(
            "terms", types.ARRAY, element_type=text, max_capacity=MAX_TERMS, max_length=TERM_LENGTH
        )
        schema.add_field("bounds", types.JSON)
        schema.add_field("origin", text, max_length=MAX_URI_BYTES)
        schema.add_field("source", types.JSON)
        schema.add_field("version", types.INT64)
        schema.add_field("lot", types.INT64)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="HNSW", metric_type="IP", params=_BUILD)
        options: dict[str, Any] = {"schema": schema, "index_params": index, "properties": dict(properties)}
        options |= {"consistency_level": _STRONG, "timeout": self._timeout}
        self._told(partial(self._client.create_collection, name, **options))

    def note(self, name: str, properties: Mapping[str, str]) -> None:
        """Set some of the properties of a collection."""
        self._call(self._client.alter_collection_properties, name, dict(properties))

    def point(self, alias: str, name: str) -> None:
        """Let a new alias stand for a collection; AlreadyExists."""
        self._call(self._client.create_alias, name, alias)

    def repoint(self, alias: str, name: str) -> None:
        """Let an alias that is there stand for another collection, at once."""
        self._call(self._client.alter_alias, name, alias)

    def unpoint(self, alias: str) -> None:
        """Remove an alias."""
        self._call(self._client.drop_alias, alias)

    def drop(self, name: str) -> None:
        """Remove a collection."""
        self._call(self._client.drop_collection, name)

    def count(self, name: str, condition: str) -> int:
        """Count the rows that fulfil a condition."""
        (row,) = self.rows(name, condition, ["count(*)"])
        return int(row["count(*)"])

    def rows(self, name: str, condition: str, fields: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """Return the rows that fulfil a condition; with a `limit` so many of them, any."""
        options |= {"output_fields": list(fields), "consistency_level": _STRONG}
        return [dict(row) for row in self._call(self._client.query, name, filter=condition, **options)]

    def first(self, name: str, condition: str, fields: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Return the first of those rows by key, in order: `limit` or less, none only where none is left."""
        # As pymilvus' own iterators, whose conditions do not escape keys; Strong is the collection's default.
        ordered = {"reduce_stop_for_best": True, "iterator": "True"}
        rows = self.rows(name, condition, fields, limit=limit, **ordered)
        return sorted(rows, key=lambda row: row["key"])

    def nearest(
        self, name: str, vectors: NDArray[np.float32], limit: int, condition: str, fields: Sequence[str]
    ) -> list[list[dict[str, Any]]]:
        """Return, for each vector (Q, d), the rows nearest to it with their `score`, best first."""
        breadth = min(_MOST_BREADTH, max(_LEAST_BREADTH, 2 * limit))
        found = self._call(
            self._client.search,
            name,
            data=list(vectors),
            anns_field="vector",
            filter=condition,
            limit=limit,
            output_fields=["key", *fields],
            search_params={"metric_type": "IP", "params": {"ef": breadth}},
            consistency_level=_STRONG,
        )
        return [[{**hit["entity"], "score": float(hit["distance"])} for hit in hits] for hits in found]

    def put(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Store rows, each in place of the one of its key."""
        self._call(self._client.upsert, name, rows)

    def flush(self, name: str) -> None:
        """Have all that was put until now sealed, to be indexed; else the server does so at some time."""
        with suppress(CrossbatchError):  # it is late, busy or not allowed; nothing is lost
            self._call(self._client.flush, name)

    def remove(self, name: str, condition: str) -> None:
        """Delete the rows that fulfil a condition."""
        self._call(self._client.delete, name, filter=condition)

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call what may be repeated, until it is done or the time is up."""
        end, pause = time.monotonic() + self._timeout, _PAUSE
        while True:
            left = end - time.monotonic()
            try:
                return self._told(partial(method, *args, timeout=left, **options))
            except _Passing as error:
                if time.monotonic() + pause > end:
                    raise
                if isinstance(error, _Unloaded):
                    self._told(partial(self._client.load_collection, args[0], timeout=left))
            time.sleep(pause)
            pause *= 2

    def _told(self, work: Callable[[], T]) -> T:
        """Do some work of pymilvus, whatever of whose exceptions becomes an error of ours."""
        try:
            return work()
        except Exception as error:  # of gRPC and of Python, too
            raise _translated(error, self.address) from error


def _translated(error: Exception, address: str) -> CrossbatchError:
    """Return the error of ours that tells what pymilvus raised."""
    if isinstance(error.__cause__, Exception) and callable(getattr(error.__cause__, "code", None)):
        error = error.__cause__  # gRPC's error tells more than what pymilvus makes of it
    code: Any = getattr(error, "code", None)
    code = code() if callable(code) else code  # of gRPC's errors it is a method
    told = getattr(error, "message", "") or getattr(error, "details", str)() or error
    unknown = _NOT_READY if getattr(error, "retriable", False) else _OTHERS
    kind, sentence = _ERRORS.get(getattr(code, "name", code), unknown)
    return kind(f"the Milvus server at {address} {sentence.format(cause_of(Exception(told)))}")
