"""How a training image is changed before the model sees it."""

from pydantic import BaseModel, Field

__all__ = ["AugmentationSettings"]


class AugmentationSettings(BaseModel):
    """Sizes are shares of the image, angles degrees."""

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
    erasing: float = Field(
        0.0, ge=0, le=1, description="probability of erasing a random rectangle of the picture"
    )
    quarter_turns: bool = Field(
        False,
        description="whether each class turned by 90, 180 and 270 degrees is one more class to train on, so"
        " that an epoch is four times as long",
    )
    views: int = Field(
        2,
        ge=1,
        le=64,
        description="of a frozen backbone: how many views of each image are cached; the first is what the"
        " served model sees, the others are augmented",
    )
    location_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="of a frozen backbone: share of the places of its map, drawn at random, that a step sees",
    )
    fill: int = Field(
        255,
        ge=0,
        le=255,
        description="grey level of what lies outside a rotated or shifted image: 0 is black, 255 white",
    )
