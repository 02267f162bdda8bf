"""A recipe: every number that training needs, by name and checked."""

import difflib
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.catalog.catalog import Layout, SplitRule
from serving.errors import BadSetting

__all__ = [
    "AUGMENTATION", "AssignOn", "FitOn", "PoolingName", "Recipe", "RidgeOn", "check_settings", "make_recipe",
]  # fmt: skip

AssignOn = Literal["unit", "raw", "ball"]
FitOn = Literal["raw", "unit"]
PoolingName = Literal["gap", "gap_gmp", "gem"]
RidgeOn = Literal["absolute", "trace"]
AUGMENTATION = frozenset(
    ("crop_scale", "crop_ratio", "flip", "jitter", "rotation", "translation", "zoom", "shear", "erasing")
) | {"quarter_turns", "views", "location_share", "fill"}
"""The settings that say how a training image is changed before the model sees it."""

_Share = Annotated[float, Field(ge=0, le=1)]
_PositiveShare = Annotated[float, Field(gt=0, le=1)]
_ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
_Rate = Annotated[float, Field(ge=0, le=10)]
_Positive = Annotated[float, Field(gt=0, le=1000)]
_NotNegative = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]
_CountFromOne = Annotated[int, Field(ge=1)]
_Option = Annotated[float | str, Field(union_mode="left_to_right")]  # a number where YAML takes it for text


class Recipe(BaseModel):
    """The settings of one training.

    Letters: S pixels a side, B = P K images in a batch, C classes, d dimensions, m prototypes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    # What is trained: backbone, pooling, head and prototypes.
    backbone: str = "resnet20"
    """network that makes the feature map: resnet20, bn_inception, or a model of timm"""
    weights: str = "none"
    """what the backbone starts from: none (random weights), published (the usual ImageNet file, where it
    lies in torch's or Hugging Face's cache), package:MODULE installed by pip, or the path of a
    .safetensors or .pth file"""
    image_size: int = Field(32, ge=8, le=1024)
    """S: side of the square that the model sees, in pixels"""
    crop_fraction: Annotated[float, Field(ge=0.1, le=1)] = 1.0
    """share of an image's shorter side that the centre crop keeps when the model is used"""
    resampling: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    """filter that resizes images, in training and in use"""
    dimension: int = Field(128, ge=2, le=4096)
    """d: how many components an embedding has"""
    pooling: PoolingName = "gap"
    """how local features become an embedding: their mean, mean plus maximum, or generalised mean with a
    learned exponent, which is meant for features after a ReLU"""
    prototypes: int = Field(64, ge=2, le=256)
    """m: how many prototypes the histogram operator has"""
    assignment_scale: _Positive = 60.0
    """inverse temperature of the softmax over prototypes: the larger, the harder"""
    assign_on: AssignOn = "unit"
    """what the softmax compares: features and prototypes at unit length (cosines), raw, or features shrunk
    into the unit ball and prototypes as they are"""
    codebook_init: Literal["random", "k_means", "k_centre"] = "random"
    """start of the histogram operator's prototypes: random, or from local features of training images by
    k-means++ or by greedy k-centre"""
    head_init: Literal["random", "pca", "whiten", "whiten_within"] = "random"
    """start of the 1x1 convolution: random, the principal axes of the training images' features, or these
    after whitening by their total or their within-class scatter"""
    head_shrinkage: _Positive = 1.0
    """of whitening: multiple of the mean variance that is added to each variance"""
    head_power: _PositiveShare = 0.5
    """of whitening: scatter is raised to minus this power; 0.5 whitens wholly, less partly"""
    head_centre: _Share = 0.0
    """of a closed-form start: share of the mean feature's direction that is taken out"""
    head_length: _Positive = 1.0
    """of a closed-form start: mean length of the training images' embeddings"""

    # What a training step minimises: the loss, the XML term, the memory, mixing.
    loss: str = "contrastive"
    """name of the loss, for the embeddings and for the XML term alike"""
    loss_options: dict[str, _Option] = {}
    """what the loss takes beside its name, as in {neg_margin: 0.3}; its own defaults where left out
    (docs/method.md lists them)"""
    xml_weight: _Share = 0.1
    """lambda: share of the cross-batch loss in the whole loss; 0 trains without XML"""
    xml_warmup: _Share = 0.0
    """share of all steps over which lambda rises from 0 to xml_weight"""
    xml_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how lambda goes on after its warm-up: as it is, or down to 0 in a line or half a cosine"""
    xml_prototypes: Literal["batch", "recursion"] = "batch"
    """what expresses one half of a batch: prototypes fitted to the other half, or to the other half and
    all batches before, each half's own classes left out"""
    recursion_decay: _PositiveShare = 0.99
    """alpha: how much an older batch counts in the recursion, a step later"""
    ridge: _Positive = 0.005
    """regulariser of the least-squares fit of prototypes to a batch"""
    ridge_on: RidgeOn = "absolute"
    """whether ridge is taken as it is, or relative to the mean eigenvalue of the histograms' Gram matrix
    that is fitted, its trace over the number of prototypes"""
    reconstruction_weight: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """weight of the mean squared error with which prototypes fitted to a batch rebuild its embeddings; it
    moves the codebook alone, so that a run with xml_weight 0 has learnt prototypes too"""
    fit_on: FitOn = "raw"
    """whether prototypes are fitted to embeddings as they are or at unit length"""
    memory_batches: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """cross-batch memory (XBM): how many batches of embeddings it holds; 0 is without"""
    memory_start: _Count = 0
    """step from which on the memory fills and its pairs count"""
    memory_weight: float = Field(1.0, ge=0, le=100)
    """weight of the loss on pairs of batch and memory, beside the batch's own"""
    mixing: Literal["none", "input", "feature", "embedding", "all"] = "none"
    """Metrix: what is mixed of pairs of two classes, pixels, the backbone's features half way, or
    embeddings; all draws one of the three each step"""
    mixing_weight: float = Field(0.4, ge=0, le=100)
    """Metrix: weight of the loss on mixed examples beside the clean one"""
    mixing_alpha: float = Field(2.0, gt=0, le=100)
    """Metrix: shares of a mixture are drawn from Beta(alpha, alpha)"""

    # How training images are dealt out: batches and epochs.
    classes_per_batch: int = Field(8, ge=1, le=4096)
    """P: classes in a batch"""
    images_per_class: int = Field(4, ge=1, le=1024)
    """K: images of each class in a batch"""
    epochs: int = Field(10, ge=1, le=100_000)
    """passes over the training images"""
    batches_per_epoch: int | None = Field(None, ge=1)
    """batches that count as an epoch; as many as every image needs when not given"""

    # How weights move: optimiser, rates (peaks, each of its own group) and their schedule, what is frozen.
    optimizer: Literal["adamw", "adam", "radam", "rmsprop"] = "adamw"
    """rule of a step; all but adamw add the weight decay to the gradient"""
    learning_rate: _Rate = 1e-3
    """peak learning rate of the backbone; 0 leaves it as it is, BatchNorm's statistics apart"""
    head_learning_rate: _Rate = 1e-3
    """peak learning rate of the 1x1 convolution"""
    prototype_learning_rate: _Rate = 1e-3
    """peak learning rate of the prototypes of the histogram operator"""
    loss_learning_rate: Annotated[float, Field(ge=0, le=100)] = 1e-3
    """peak learning rate of what a loss learns itself: its proxies, classifier or messages"""
    momentum: _ShareBelowOne = 0.9
    """share of the last step that rmsprop takes again"""
    weight_decay: _Share = 1e-4
    """weight decay, on weights of backbone and head that have two dimensions and more"""
    warmup: float = Field(0.0, ge=0, le=0.9)
    """share of all steps over which learning rates rise from 0"""
    schedule: Literal["cosine", "constant", "drops"] = "cosine"
    """how learning rates go on after the warm-up: half a cosine down to 0, as they are, or times
    drop_factor at each of drop_epochs"""
    drop_epochs: list[_CountFromOne] = []
    """with schedule drops: after how many epochs the learning rates drop"""
    drop_factor: _PositiveShare = 0.1
    """with schedule drops: what the learning rates are multiplied by"""
    clip_norm: _NotNegative = 0.0
    """length that a longer gradient is shortened to; 0 leaves it as it is"""
    clip_value: _NotNegative = 0.0
    """largest component of a gradient, either way; 0 leaves them as they are"""
    ema_decay: _ShareBelowOne = 0.0
    """share of the moving average of weights that a step keeps; the average is what is measured and kept,
    and 0 is without"""
    freeze: Literal["none", "backbone"] = "none"
    """what stays as it starts: nothing as a whole, or the backbone, whose features of every image are
    computed once and cached, so that a head trains in seconds"""
    freeze_batchnorm: bool = False
    """whether BatchNorm keeps the statistics that it starts with"""
    freeze_batchnorm_weights: bool = False
    """whether scale and shift of BatchNorm stay as they start, and its statistics with them"""
    freeze_stages: int = Field(0, ge=0, le=100)
    """how many stages of the backbone stay as they start, the stem first"""
    freeze_epochs: _Count = 0
    """over how many epochs, at the start, the whole backbone stays as it is"""

    # How a training image is changed before the model sees it: `AUGMENTATION` names these.
    crop_scale: _PositiveShare = 1.0
    """smallest share of an image's area that a random crop keeps; 1 crops as in use"""
    crop_ratio: float = Field(1.3333, ge=1, le=4)
    """largest ratio of a random crop's longer side to its shorter"""
    flip: _Share = 0.0
    """probability of mirroring left and right"""
    jitter: _Share = 0.0
    """largest change of brightness, contrast and saturation, as a share"""
    rotation: float = Field(0.0, ge=0, le=180)
    """largest rotation either way, in degrees"""
    translation: _Share = 0.0
    """largest shift along each side, as a share of it"""
    zoom: _ShareBelowOne = 0.0
    """largest change of scale either way, as a share"""
    shear: float = Field(0.0, ge=0, le=90)
    """largest shear either way, in degrees"""
    erasing: _Share = 0.0
    """probability of erasing a random rectangle of the picture"""
    quarter_turns: bool = False
    """whether each class turned by 90, 180 and 270 degrees is one more class to train on, so that an epoch
    is four times as long"""
    views: Annotated[int, Field(ge=1, le=64)] = 2
    """of a frozen backbone: how many views of each image are cached; the first is what the served model
    sees, the others are augmented"""
    location_share: _PositiveShare = 1.0
    """of a frozen backbone: share of the places of its map, drawn at random, that a step sees"""
    fill: int = Field(255, ge=0, le=255)
    """grey level of what lies outside a rotated or shifted image: 0 is black, 255 white"""

    # Which classes train, which choose the best epoch, and which are left for the test; sorted by name.
    made_for: Literal["any", Layout] = "any"
    """format of the one data set that the recipe is for; another one is refused"""
    split_by: Literal["class", "folder", "given"] = "class"
    """what is split into train and test: classes, top-level folders, or as the data set says"""
    split_train: _CountFromOne | Annotated[float, Field(gt=0, lt=1)] = 0.5
    """how many of the sorted names train: a share below 1, else a count"""
    validation: _ShareBelowOne = 0.0
    """share of the training classes held out to choose the best epoch; 0 keeps the last"""
    folds: Annotated[int, Field(ge=0, le=100)] = 0
    """into how many blocks the sorted training classes are cut, of which one is held out instead of
    `validation`; 0 is without"""
    fold: int = Field(0, ge=0, le=99)
    """which of the folds is held out, counted from 0"""
    fold_rule: Literal["even", "wrapped"] = "even"
    """where folds are cut: in even blocks, or in blocks that follow a training part of fixed size round
    the end of the list, as the original MLRC code does"""

    # How the training runs on a machine: precision, seed, processes, memory, when it ends.
    evaluate_every: _CountFromOne = 1
    """how many epochs lie between evaluations on the validation classes"""
    patience: _Count = 0
    """how many epochs training goes on without a better validation MAP@R; 0 never stops early"""
    min_delta: _ShareBelowOne = 0.0
    """by how much a better MAP@R has to be better, to be kept and for `patience`"""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """precision of the products in a training step; losses and the fit of prototypes stay float32"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of every random draw"""
    workers: int = Field(0, ge=0, le=256)
    """how many processes augment images; 0 does it in the training process"""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """how many threads a training step takes on the CPU; 0 is torch's own choice, one a core"""
    cache_gib: _NotNegative = 8.0
    """of a frozen backbone: the largest cache of features that is made, in GiB"""
    memory_gib: _NotNegative = 4.0
    """memory for decoded images, in GiB; those beyond it are read at each use"""

    @property
    def batch_size(self) -> int:
        """B = P K, images in a batch."""
        return self.classes_per_batch * self.images_per_class

    @property
    def split(self) -> SplitRule:
        """The rule that `serving.catalog.catalog.select` takes."""
        return SplitRule(by=self.split_by, train=self.split_train)

    @property
    def caches_features(self) -> bool:
        """Whether the backbone rests, so that its features come from a cache."""
        return self.freeze == "backbone"

    @property
    def learns_prototypes(self) -> bool:
        """Whether anything moves the codebook, which stays as it was drawn otherwise."""
        return self.xml_weight > 0 or self.reconstruction_weight > 0

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.folds == 1:
            raise ValueError("folds is 1, which would leave nothing to train on; give at least 2, or 0")
        if self.folds and self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold}, but {self.folds} folds are counted from 0")
        if self.folds and self.validation:
            raise ValueError("folds and validation both hold classes out; set one of them to 0")
        if self.patience and not (self.folds or self.validation):
            raise ValueError("patience needs validation classes; set validation or folds")
        if 0 < self.patience < self.evaluate_every:
            raise ValueError(
                f"patience is {self.patience}, but evaluate_every leaves {self.evaluate_every} epochs between"
                " two evaluations; set it to as many or more"
            )
        if self.xml_weight and self.classes_per_batch == 1:
            raise ValueError(
                "the XML loss parts classes; set classes_per_batch to 2 or more, or xml_weight to 0"
            )
        if self.caches_features and (self.quarter_turns or self.mixing not in ("none", "embedding")):
            raise ValueError(
                "freeze backbone computes the features of each image once, but quarter_turns and mixing of"
                " pixels or features change them at each step; set freeze to none, or these off"
            )
        if (self.schedule == "drops") != bool(self.drop_epochs):
            raise ValueError("schedule drops and drop_epochs go together; set both or neither")
        return self


def make_recipe(values: Mapping[str, Any], *, source: str) -> Recipe:
    """Check values read from a file or the command line; a `BadSetting` names the key that does not fit."""
    for key in values:
        if key not in Recipe.model_fields:
            raise BadSetting(
                f"recipe {source} has the unknown key {key!r}; the nearest valid one is {_nearest(key)!r}"
            )
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # settings that do not fit one another
            raise BadSetting(f"recipe {source}: {first['ctx']['error']}") from error
        key = str(first["loc"][0])
        told = " ".join(str(Recipe.model_fields[key].description).split())
        raise BadSetting(
            f"recipe {source} sets {key!r} to {reprlib.repr(first['input'])}: {first['msg'].lower()}"
            f" ({key}: {told})"
        ) from error


def check_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse, with a `BadSetting`, to go on in a folder with other settings than it was trained with."""
    for key, value in now.items():
        if before.get(key) != value:
            raise BadSetting(
                f"{path} was trained with {key} = {before.get(key)}, but now {value} is asked for: choose"
                " another folder for --out, or set it as it was"
            )


def _nearest(key: object) -> str:
    """Find the setting that was meant: by its initials (`lr`), else by its spelling."""
    for name in Recipe.model_fields:
        if "".join(part[0] for part in name.split("_")) == key:
            return name
    return difflib.get_close_matches(str(key), Recipe.model_fields, n=1, cutoff=0.0)[0]
