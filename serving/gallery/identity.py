"""Which model a gallery belongs to, and which others may ask it."""

from typing import Protocol

from serving.errors import ModelMismatch
from serving.gallery.store.schema import Meta

__all__ = ["ModelIdentity", "check_model"]


class ModelIdentity(Protocol):
    """What a gallery asks of a model; `serving.model.spec.ModelSpec` has it."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of its graph and weights."""

    @property
    def fp32_fingerprint(self) -> str | None:
        """That of the file of full precision it was made from, if it was."""

    @property
    def dimension(self) -> int:
        """The length of its embeddings."""


def check_model(gallery: str, meta: Meta, model: ModelIdentity) -> None:
    """Accept the model a gallery was made with, and a file of lower precision made from it.

    Raises:
        ModelMismatch: It is another model; both are named.
    """
    theirs = (model.fingerprint, model.fp32_fingerprint)
    if meta.fingerprint in theirs and meta.dimension == model.dimension:
        return
    ours = f"{meta.model_name} (fingerprint {meta.fingerprint[:12]}, dimension {meta.dimension})"
    given = f"{model.name} (fingerprint {model.fingerprint[:12]}, dimension {model.dimension})"
    raise ModelMismatch(
        f"the gallery {gallery} holds embeddings of the model {ours}, and the model given is {given}; "
        "give the gallery's own model, or index the images into a new gallery"
    )
