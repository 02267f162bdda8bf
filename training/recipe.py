"""A recipe: every number that training needs, by name; the YAML files in `recipes/` are the ones we ship."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.catalog import SplitRule
from serving.errors import BadSetting, NotFound

__all__ = ["RECIPES", "Recipe", "head_comment", "load_recipe", "make_recipe", "parse_yaml", "recipe_names"]

RECIPES = Path(__file__).parent / "recipes"


class Recipe(BaseModel):
    """The settings of one training; letters: B batch, C classes, d dimensions, m prototypes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # the model
    backbone: str = Field(
        "resnet20",
        description="network that makes the feature map: resnet20, or a convolutional model of timm",
    )
    weights: str = Field(
        "none",
        description="what the backbone starts from: none (random weights), package:MODULE installed by pip,"
        " or the path of a .safetensors or .pth file",
    )
    image_size: int = Field(
        32, ge=8, le=1024, description="S: side of the square that the model sees, in pixels"
    )
    crop_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of an image's shorter side that the centre crop keeps when the model is used",
    )
    resampling: Literal["bilinear", "bicubic", "lanczos"] = Field(
        "bilinear", description="filter that resizes images, in training and in use"
    )
    dimension: int = Field(128, ge=2, le=4096, description="d: how many components an embedding has")
    prototypes: int = Field(64, ge=2, le=256, description="m: how many prototypes the histogram operator has")
    epsilon: float = Field(
        10.0, gt=0, le=1000, description="inverse temperature of the softmax over prototypes"
    )
    unit: bool = Field(
        True,
        description="whether the softmax sees features and prototypes at unit length, and so cosines",
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

    # the loss
    xml_weight: float = Field(
        0.01,
        ge=0,
        le=1,
        description="lambda: share of the cross-batch loss in the whole loss; 0 trains without XML",
    )
    ridge: float = Field(
        0.05, gt=0, le=1000, description="regulariser of the least-squares fit of prototypes to a batch"
    )
    fit_on: Literal["raw", "unit"] = Field(
        "raw", description="whether prototypes are fitted to embeddings as they are or at unit length"
    )
    loss: str = Field(
        "contrastive", description="name of the loss, for the embeddings and for the XML term alike"
    )
    pos_margin: float = Field(
        1.0, ge=-1, le=1, description="cosine that the loss pulls pairs of one class up to"
    )
    neg_margin: float = Field(
        0.5, ge=-1, le=1, description="cosine that the loss pushes pairs of two classes down to"
    )

    # the batches
    classes_per_batch: int = Field(8, ge=1, le=4096, description="P: classes in a batch")
    images_per_class: int = Field(4, ge=1, le=1024, description="K: images of each class in a batch")
    epochs: int = Field(10, ge=1, le=100_000, description="passes over the training images")
    batches_per_epoch: int | None = Field(
        None, ge=1, description="batches that count as an epoch; as many as every image needs when not given"
    )

    # the steps
    learning_rate: float = Field(
        1e-3, ge=0, le=10, description="peak learning rate of the backbone; 0 leaves it as it is"
    )
    head_learning_rate: float = Field(
        1e-3, ge=0, le=10, description="peak learning rate of the 1x1 convolution"
    )
    prototype_learning_rate: float = Field(
        1e-3, ge=0, le=10, description="peak learning rate of prototypes and of a loss's proxies"
    )
    weight_decay: float = Field(
        1e-4, ge=0, le=1, description="weight decay of AdamW, on weights of two dimensions and more"
    )
    warmup: float = Field(
        0.0, ge=0, le=0.9, description="share of all steps over which learning rates rise from 0"
    )
    schedule: Literal["cosine", "constant"] = Field(
        "cosine",
        description="how learning rates go on after the warm-up: half a cosine down to 0, or as they are",
    )
    clip_norm: float = Field(
        0.0, ge=0, description="length that a longer gradient is shortened to; 0 leaves it as it is"
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the moving average of weights that a step keeps; the average is what is"
        " measured and kept, and 0 is without",
    )
    freeze_batchnorm: bool = Field(
        False, description="whether BatchNorm keeps the statistics that it starts with"
    )
    freeze_stages: int = Field(
        0, ge=0, le=100, description="how many stages of the backbone stay as they start, the stem first"
    )

    # the augmentation
    crop_scale: float = Field(
        1.0,
        gt=0,
        le=1,
        description="smallest share of an image's area that a random crop keeps; 1 crops as in use",
    )
    crop_ratio: float = Field(
        1.3333, ge=1, le=4, description="largest ratio of a random crop's longer side to its shorter"
    )
    flip: float = Field(0.0, ge=0, le=1, description="probability of mirroring left and right")
    jitter: float = Field(
        0.0, ge=0, le=1, description="largest change of brightness, contrast and saturation, as a share"
    )
    rotation: float = Field(0.0, ge=0, le=180, description="largest rotation either way, in degrees")
    translation: float = Field(0.0, ge=0, le=1, description="largest shift along each side, as a share of it")
    zoom: float = Field(0.0, ge=0, lt=1, description="largest change of scale either way, as a share")
    shear: float = Field(0.0, ge=0, le=90, description="largest shear either way, in degrees")
    quarter_turns: bool = Field(
        False,
        description="whether each class turned by 90, 180 and 270 degrees is one more class to train on, so"
        " that an epoch is four times as long",
    )
    fill: int = Field(
        255,
        ge=0,
        le=255,
        description="grey level of what lies outside a rotated or shifted image: 0 is black, 255 white",
    )

    # the data
    split_by: Literal["class", "folder", "given"] = Field(
        "class",
        description="what is split into train and test: classes, top-level folders, or as the data set says",
    )
    split_train: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="how many of the sorted names train: a share below 1, else a count"
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training classes held out to choose the best epoch; 0 keeps the last",
    )

    # the run
    evaluate_every: int = Field(
        1, ge=1, description="how many epochs lie between evaluations on the validation classes"
    )
    precision: Literal["32-true", "bf16-mixed"] = Field(
        "32-true", description="precision of the products in a training step"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of every random draw")
    workers: int = Field(
        0, ge=0, le=256, description="how many processes augment images; 0 does it in the training process"
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="how many threads a training step takes on the CPU; 0 is torch's own choice, one a core",
    )
    memory_gib: float = Field(
        4.0, ge=0, description="memory for decoded images, in GiB; those beyond it are read at each use"
    )

    @property
    def split(self) -> SplitRule:
        """The rule that `serving.catalog.select` takes."""
        return SplitRule(by=self.split_by, train=self.split_train)

    @property
    def loss_options(self) -> dict[str, float]:
        """What `training.loss.build_loss` takes beside the loss's name."""
        return {"pos_margin": self.pos_margin, "neg_margin": self.neg_margin}


def recipe_names() -> list[str]:
    """Name the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its name, or by the path of a YAML file, with some keys set anew.

    Args:
        name: One of `recipe_names()`, or a path that ends in .yaml.
        overrides: `key=value` each; the value is read as YAML.

    Raises:
        NotFound: If there is no such recipe or file.
        BadSetting: If a key is unknown or its value ill-typed; the message names the nearest key.
    """
    values = _read_yaml(_find(name))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise BadSetting(f"--set takes key=value, but got {override!r}")
        try:
            values[key.strip()] = parse_yaml(text)
        except ValueError as error:
            raise BadSetting(f"the value of --set {override[:80]!r} is not YAML") from error
    return make_recipe(values, source=name)


def make_recipe(values: Mapping[str, Any], *, source: str) -> Recipe:
    """Check values read from a file or the command line.

    Raises:
        BadSetting: If a key is unknown or its value ill-typed.
    """
    for key in values:
        if key not in Recipe.model_fields:
            raise BadSetting(
                f"recipe {source} has the unknown key {key!r}; the nearest valid one is {_nearest(key)!r}"
            )
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        told = Recipe.model_fields[key].description
        raise BadSetting(
            f"recipe {source} sets {key!r} to {first['input']!r}: {first['msg'].lower()} ({key}: {told})"
        ) from error


def parse_yaml(text: str) -> Any:
    """Read plain values.

    Raises:
        ValueError: If it is no YAML, a date that is none for one, or nested too deeply.
    """
    try:
        return yaml.safe_load(text)
    except Exception as error:  # beside its own, PyYAML lets pass whatever the making of a value raises
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def head_comment(name: str) -> str:
    """Return the comment at the head of a recipe of ours: paper, command, hardware, time, score.

    Raises:
        NotFound: If there is no such recipe.
    """
    lines = []
    for line in _find(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" ").rstrip())
    return "\n".join(lines)


def _nearest(key: object) -> str:
    """Find the setting that was meant: by its initials (`lr`), else by its spelling."""
    for name in Recipe.model_fields:
        if "".join(part[0] for part in name.split("_")) == key:
            return name
    return difflib.get_close_matches(str(key), Recipe.model_fields, n=1, cutoff=0.0)[0]


def _find(name: str) -> Path:
    """Give the path of a recipe of ours by name, or of the caller's own file."""
    if name in recipe_names():
        return RECIPES / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise NotFound(f"no recipe file is at {path}")
    close = difflib.get_close_matches(name, recipe_names(), n=1, cutoff=0.0)
    nearest = f"; the nearest is {close[0]!r}" if close else ""
    raise NotFound(
        f"no recipe is called {name!r}{nearest}; give one of {', '.join(recipe_names())} or a .yaml file"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadSetting(f"recipe {path} is not readable YAML: {line}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadSetting(f"recipe {path} must be a table of key: value, but holds a {type(values).__name__}")
    return values
