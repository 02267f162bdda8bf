"""What a training step minimises: the loss, the XML term, the memory, mixing."""

from typing import Literal

from pydantic import BaseModel, Field

__all__ = ["ObjectiveSettings"]


class ObjectiveSettings(BaseModel):
    """Loss l on embeddings, its XML term, and what the steps before and mixed images add."""

    loss: str = Field(
        "contrastive", description="name of the loss, for the embeddings and for the XML term alike"
    )
    loss_options: dict[str, float | str] = Field(
        {},
        description="what the loss takes beside its name, as in {neg_margin: 0.3}; its own defaults where"
        " left out (docs/method.md lists them)",
    )

    xml_weight: float = Field(
        0.1,
        ge=0,
        le=1,
        description="lambda: share of the cross-batch loss in the whole loss; 0 trains without XML",
    )
    xml_warmup: float = Field(
        0.0, ge=0, le=1, description="share of all steps over which lambda rises from 0 to xml_weight"
    )
    xml_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="how lambda goes on after its warm-up: as it is, or down to 0 in a line or half a cosine",
    )
    xml_prototypes: Literal["batch", "recursion"] = Field(
        "batch",
        description="what expresses one half of a batch: prototypes fitted to the other half, or to the other"
        " half and all batches before, each half's own classes left out",
    )
    recursion_decay: float = Field(
        0.99, gt=0, le=1, description="alpha: how much an older batch counts in the recursion, a step later"
    )
    ridge: float = Field(
        0.005, gt=0, le=1000, description="regulariser of the least-squares fit of prototypes to a batch"
    )
    ridge_on: Literal["absolute", "trace"] = Field(
        "absolute",
        description="whether ridge is taken as it is, or relative to the mean eigenvalue of the histograms'"
        " Gram matrix that is fitted, its trace over the number of prototypes",
    )
    reconstruction_weight: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="weight of the mean squared error with which prototypes fitted to a batch rebuild its"
        " embeddings; it moves the codebook alone, so that a run with xml_weight 0 has learnt prototypes too",
    )
    fit_on: Literal["raw", "unit"] = Field(
        "raw", description="whether prototypes are fitted to embeddings as they are or at unit length"
    )

    memory_batches: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="cross-batch memory (XBM): how many batches of embeddings it holds; 0 is without",
    )
    memory_start: int = Field(0, ge=0, description="step from which on the memory fills and its pairs count")
    memory_weight: float = Field(
        1.0,
        ge=0,
        le=100,
        description="weight of the loss on pairs of batch and memory, beside the batch's own",
    )

    mixing: Literal["none", "input", "feature", "embedding", "all"] = Field(
        "none",
        description="Metrix: what is mixed of pairs of two classes, pixels, the backbone's features half way,"
        " or embeddings; all draws one of the three each step",
    )
    mixing_weight: float = Field(
        0.4, ge=0, le=100, description="Metrix: weight of the loss on mixed examples beside the clean one"
    )
    mixing_alpha: float = Field(
        2.0, gt=0, le=100, description="Metrix: shares of a mixture are drawn from Beta(alpha, alpha)"
    )

    @property
    def learns_prototypes(self) -> bool:
        """Whether anything moves the codebook, which stays as it was drawn otherwise."""
        return self.xml_weight > 0 or self.reconstruction_weight > 0
