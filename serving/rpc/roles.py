"""What each call needs of its caller: a role, or nothing at all."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

__all__ = ["PACKAGES", "ROLES", "Role", "brings_inputs", "is_write", "role_of", "short_name"]

Role: TypeAlias = Literal["read", "write"]

PACKAGES = ("crossbatch.v1.", "inference.")
"""Our own packages; every other service is gRPC's."""

ROLES: Mapping[str, Role | None] = {
    "/crossbatch.v1.RetrievalService/Embed": "read",
    "/crossbatch.v1.RetrievalService/Search": "read",
    "/crossbatch.v1.RetrievalService/Explain": "read",
    "/crossbatch.v1.GalleryService/CreateGallery": "write",
    "/crossbatch.v1.GalleryService/GetGallery": "read",
    "/crossbatch.v1.GalleryService/ListGalleries": "read",
    "/crossbatch.v1.GalleryService/DeleteGallery": "write",
    "/crossbatch.v1.GalleryService/BuildIndex": "write",
    "/crossbatch.v1.GalleryService/SwitchGallery": "write",
    "/crossbatch.v1.GalleryService/RollbackGallery": "write",
    "/crossbatch.v1.GalleryService/UpsertItems": "write",
    "/crossbatch.v1.GalleryService/DeleteItems": "write",
    "/crossbatch.v1.GalleryService/GetItem": "read",
    "/crossbatch.v1.GalleryService/ListItems": "read",
    "/crossbatch.v1.ModelService/GetModel": "read",
    "/crossbatch.v1.ModelService/ListModels": "read",
    "/crossbatch.v1.ModelService/ReloadModels": "write",
    # Load balancers and probes ask these, mostly without a way to send a key.
    "/inference.GRPCInferenceService/ServerLive": None,
    "/inference.GRPCInferenceService/ServerReady": None,
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/inference.GRPCInferenceService/ModelReady": "read",
    "/inference.GRPCInferenceService/ServerMetadata": "read",
    "/inference.GRPCInferenceService/ModelMetadata": "read",
    "/inference.GRPCInferenceService/ModelInfer": "read",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "read",
}
"""By a call's full name, the role that it needs; None where anybody may make it."""


def role_of(method: str) -> Role | None:
    """Look up what a call needs; a call that is not in the table needs the most.

    Args:
        method: As gRPC writes it, with the slash before it.
    """
    return ROLES.get(method, "write")


# Their messages may be large. All others are short, and some hold no permit.
_LOADED = frozenset(
    {
        "/crossbatch.v1.RetrievalService/Embed",
        "/crossbatch.v1.RetrievalService/Search",
        "/crossbatch.v1.RetrievalService/Explain",
        "/crossbatch.v1.GalleryService/UpsertItems",
        "/inference.GRPCInferenceService/ModelInfer",
    }
)


def brings_inputs(method: str) -> bool:
    """Tell whether a call, by its full name, brings images, queries or items."""
    return method in _LOADED


def short_name(method: str) -> str:
    """Write a call's name as logs and metrics have it: `RetrievalService/Search`."""
    package = next((each for each in PACKAGES if method.startswith(f"/{each}")), "")
    return method.removeprefix(f"/{package}")


_WRITES = frozenset(short_name(method) for method, role in ROLES.items() if role == "write")


def is_write(name: str) -> bool:
    """Tell whether a call, by its short name, needs the role write."""
    return name in _WRITES
