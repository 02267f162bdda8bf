"""LIBC: classify each embedding twice, as it is and as the whole batch refines it by message passing.

Seidenschwarz, Elezi and Leal-Taixé, "Learning Intra-Batch Connections for Deep Metric Learning", ICML 2021.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import BadSetting

__all__ = ["LIBC"]


class LIBC(nn.Module):
    """Label-smoothed cross-entropy on embeddings and on refined embeddings, each with its own classifier.

    The images of a batch are the nodes of a full graph, each its own neighbour too. A layer passes messages
    over it: attention of h heads, with A (B, B) = softmax over j of q_i·k_j / sqrt(d / h) for each; the sum
    of A_ij v_j, heads side by side, through one linear map; then a residual and LayerNorm, and a two-layer
    perceptron of 4d units with the same. This is the encoder layer of a transformer without positions and
    without dropout, so torch's own is taken. The weights serve in training alone.

    What the paper leaves open: the message passing is at the embedding's own dimension; both cross-entropies
    count alike and are divided by the same temperature.
    """

    def __init__(
        self,
        *,
        classes: int,
        dimension: int,
        layers: int = 1,
        heads: int = 2,
        temperature: float = 0.2,
        smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        if dimension % heads:
            raise BadSetting(
                f"the libc loss has {heads} heads, which do not divide the {dimension} dimensions of an"
                " embedding; choose a number of heads that does"
            )
        self.temperature = temperature
        self.smoothing = smoothing
        self.messages = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(dimension, heads, 4 * dimension, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
        )
        self.classify = nn.Linear(dimension, classes)
        self.classify_refined = nn.Linear(dimension, classes)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch.

        Args:
            embeddings: Raw, float (B, d).
            labels: int64 (B,), each below the number of classes.

        Returns:
            A scalar, the sum of the two cross-entropies; zero with a zero gradient where there is one class.
        """
        nodes = embeddings.to(self.classify.weight.dtype)
        refined = self.messages(nodes[None])[0]  # one graph of B nodes: (1, B, d) -> (B, d)
        logits = torch.stack([self.classify(nodes), self.classify_refined(refined)])  # (2, B, C)
        losses = functional.cross_entropy(
            logits.flatten(0, 1) / self.temperature, labels.repeat(2), label_smoothing=self.smoothing
        )
        return 2 * losses  # the mean over both, so twice it is their sum
