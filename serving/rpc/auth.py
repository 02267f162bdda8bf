"""Who calls, and what he may do: API keys, and the role that each call needs."""

from collections.abc import Iterable
from pathlib import Path

from serving.errors import PermissionDenied, Unauthenticated
from serving.observability.call import Call
from serving.rpc.keys import KeysInForce, Role

__all__ = ["OURS", "ROLES", "Authenticator", "Role", "role_of", "short_name"]

OURS = ("/crossbatch.v1.", "/inference.")
"""How the calls of our own packages begin; every other service is gRPC's."""

ROLES: dict[str, Role | None] = {
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
    "/crossbatch.v1.GalleryService/GetMapTile": "read",
    "/crossbatch.v1.GalleryService/UpdateItems": "write",
    "/crossbatch.v1.GalleryService/CountItems": "read",
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

# The same for a key that is missing, unknown, revoked or no key at all: it helps nobody to guess.
_UNKNOWN = (
    "The call brings no API key that is valid here; send one as `authorization: Bearer KEY`. "
    "`crossbatch keys` makes them."
)


def role_of(method: str) -> Role | None:
    """Look up what a call, by its full name, needs; one that is not in the table needs the most."""
    return ROLES.get(method, "write")


def short_name(method: str) -> str:
    """Write a call's name as logs and metrics have it: `RetrievalService/Search`."""
    package = next((each for each in OURS if method.startswith(each)), "/")
    return method.removeprefix(package)


class Authenticator:
    """Knows who may do what, by the API keys of a file; without one everybody may do all."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file; `asks` is false where there is none."""
        self._keys = KeysInForce(path) if path else None
        self.asks = path is not None

    def authorize(self, call: Call, needed: Role) -> None:
        """Find out who makes a call, by its metadata, and whether he may; note his name in it."""
        key = self._keys.find(_sent(call.metadata)) if self._keys else None
        if key is None:
            raise Unauthenticated(_UNKNOWN)
        call.client = key.name
        if needed == "write" and key.role != "write":
            raise PermissionDenied(
                f"The key {key.name} has the role {key.role} and {call.rpc} needs the role write; "
                "use a key that has it."
            )

    def close(self) -> None:
        """Look at the file no more."""
        if self._keys:
            self._keys.close()


def _sent(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key that a call brings; empty, which no key is, if it brings none or several."""
    sent = set()
    for name, value in metadata:
        if isinstance(value, bytes):  # of a name that ends in -bin
            continue
        if name == "authorization":
            scheme, _, key = value.partition(" ")
            if scheme.lower() == "bearer":
                sent.add(key.strip())
        elif name == "x-api-key":
            sent.add(value.strip())
    return sent.pop() if len(sent) == 1 else ""
