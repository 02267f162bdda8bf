"""The Python clients: `Client` waits for its answers, `AsyncClient` has the same calls for asyncio."""

from serving.client.async_client import AsyncClient
from serving.client.client import Client
from serving.client.records import BuildProgress, Explanation, GalleryInfo, Hit, Item, ModelInfo, Reloaded
from serving.client.records import StoredItem as StoredItem

__all__ = [
    "AsyncClient", "BuildProgress", "Client", "Explanation", "GalleryInfo", "Hit", "Item", "ModelInfo",
    "Reloaded", "StoredItem",
]  # fmt: skip
