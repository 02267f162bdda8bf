"""The Python clients: `Client` waits for its answers, `AsyncClient` has the same calls for asyncio."""

from serving.client.async_client import AsyncClient
from serving.client.client import Client
from serving.client.records import (
    BuildProgress,
    Explanation,
    FieldInfo,
    FieldValues,
    GalleryInfo,
    Hit,
    Item,
    ModelInfo,
    Pair,
    Reloaded,
    StoredItem,
    ValueCount,
)

__all__ = [
    "AsyncClient", "BuildProgress", "Client", "Explanation", "FieldInfo", "FieldValues", "GalleryInfo", "Hit",
    "Item", "ModelInfo", "Pair", "Reloaded", "StoredItem", "ValueCount",
]  # fmt: skip
