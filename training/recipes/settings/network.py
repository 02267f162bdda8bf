"""What is trained: backbone, pooling, head and prototypes."""

from typing import Literal

from pydantic import BaseModel, Field

__all__ = ["AssignOn", "CodebookInit", "NetworkSettings"]

AssignOn = Literal["unit", "raw", "ball"]
CodebookInit = Literal["random", "k_means", "k_centre"]


class NetworkSettings(BaseModel):
    """Letters: S pixels a side, d dimensions, m prototypes."""

    backbone: str = Field(
        "resnet20",
        description="network that makes the feature map: resnet20, bn_inception, or a model of timm",
    )
    weights: str = Field(
        "none",
        description="what the backbone starts from: none (random weights), published (the usual ImageNet"
        " file, where it lies in torch's or Hugging Face's cache), package:MODULE installed by pip, or the"
        " path of a .safetensors or .pth file",
    )
    image_size: int = Field(
        32, ge=8, le=1024, description="S: side of the square that the model sees, in pixels"
    )
    crop_fraction: float = Field(
        1.0,
        ge=0.1,
        le=1,
        description="share of an image's shorter side that the centre crop keeps when the model is used",
    )
    resampling: Literal["bilinear", "bicubic", "lanczos"] = Field(
        "bilinear", description="filter that resizes images, in training and in use"
    )
    dimension: int = Field(128, ge=2, le=4096, description="d: how many components an embedding has")
    pooling: Literal["gap", "gap_gmp", "gem"] = Field(
        "gap",
        description="how local features become an embedding: their mean, mean plus maximum, or generalised"
        " mean with a learned exponent, which is meant for features after a ReLU",
    )
    prototypes: int = Field(64, ge=2, le=256, description="m: how many prototypes the histogram operator has")
    assignment_scale: float = Field(
        60.0,
        gt=0,
        le=1000,
        description="inverse temperature of the softmax over prototypes: the larger, the harder",
    )
    assign_on: AssignOn = Field(
        "unit",
        description="what the softmax compares: features and prototypes at unit length (cosines), raw, or"
        " features shrunk into the unit ball and prototypes as they are",
    )
    codebook_init: CodebookInit = Field(
        "random",
        description="start of the histogram operator's prototypes: random, or from local features of training"
        " images by k-means++ or by greedy k-centre",
    )
    head_init: Literal["random", "pca", "whiten", "whiten_within"] = Field(
        "random",
        description="start of the 1x1 convolution: random, the principal axes of the training images'"
        " features, or these after whitening by their total or their within-class scatter",
    )
    head_shrinkage: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="of whitening: multiple of the mean variance that is added to each variance",
    )
    head_power: float = Field(
        0.5,
        gt=0,
        le=1,
        description="of whitening: scatter is raised to minus this power; 0.5 whitens wholly, less partly",
    )
    head_centre: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of a closed-form start: share of the mean feature's direction that is taken out",
    )
    head_length: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="of a closed-form start: mean length of the training images' embeddings",
    )
