"""Cross-batch memory: the embeddings of the last steps, so that a batch is compared with many more images.

Wang, Zhang, Huang and Scott, "Cross-Batch Memory for Embedding Learning", CVPR 2020: embeddings drift slowly
once training has settled, so those of past batches still serve as references.
"""

import torch
from torch import Tensor, nn

from serving.errors import BadSetting

__all__ = ["Memory"]


class Memory(nn.Module):
    """A ring of embeddings and labels; the oldest make room for the newest.

    All of its state is in buffers, its position and how far it is filled among them: a checkpoint brings
    back the very memory that was saved, and it moves between devices as a module does.
    """

    embeddings: Tensor  # float32 (size, d)
    labels: Tensor  # int64 (size,)
    position: Tensor  # int64 (), where the next embedding goes
    filled: Tensor  # int64 (), how many rows hold one

    def __init__(self, dimension: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise BadSetting(f"a memory of {size} embeddings can hold none; it needs room for at least 1")
        self.register_buffer("embeddings", torch.zeros(size, dimension))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, embeddings: Tensor, labels: Tensor) -> None:
        """Add a batch, in its order; of one larger than the memory the last rows stay.

        Under several processes push the gathered batch, in rank order, so that all memories are alike.

        Args:
            embeddings: Raw, float (B, d); kept without their history, in float32.
            labels: int64 (B,).
        """
        size, count = len(self.labels), len(labels)
        kept = min(count, size)
        # Places are counted on the device: reading the position back would wait for it.
        places = (self.position + torch.arange(count - kept, count, device=self.labels.device)) % size
        self.embeddings[places] = embeddings[count - kept :].to(self.embeddings)
        self.labels[places] = labels[count - kept :].to(self.labels)
        self.position.add_(count).remainder_(size)
        self.filled.add_(count).clamp_(max=size)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Look at what is held.

        Returns:
            Embeddings, float32 (R, d), and labels, int64 (R,), R up to the size, in no order of time; they
            are views, which the next push changes.
        """
        filled = int(self.filled)
        return self.embeddings[:filled], self.labels[:filled]
