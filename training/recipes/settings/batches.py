"""How training images are dealt out: batches and epochs."""

from pydantic import BaseModel, Field

__all__ = ["BatchSettings"]


class BatchSettings(BaseModel):
    """Letters: P classes in a batch, K images of each."""

    classes_per_batch: int = Field(8, ge=1, le=4096, description="P: classes in a batch")
    images_per_class: int = Field(4, ge=1, le=1024, description="K: images of each class in a batch")
    epochs: int = Field(10, ge=1, le=100_000, description="passes over the training images")
    batches_per_epoch: int | None = Field(
        None, ge=1, description="batches that count as an epoch; as many as every image needs when not given"
    )

    @property
    def batch_size(self) -> int:
        """B = P K, images in a batch."""
        return self.classes_per_batch * self.images_per_class
