"""What a run's record.json must hold, so that whoever reads it later can rely on it."""

import reprlib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from serving.catalog.catalog import Layout
from serving.errors import BadArtifact

__all__ = ["MAX_NAME", "check_record"]

MAX_NAME = 200
"""Longest name of a run, in characters; it becomes the name of its exported model."""

_Path = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


class _Data(BaseModel):
    """Where a run's images are, how they were read, and which of them train."""

    model_config = ConfigDict(strict=True)

    root: _Path
    format: Layout
    table: _Path | None
    train_classes: list[str]
    train_images: int = Field(ge=0)
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class _Record(BaseModel):
    """The keys of a record that are read again; others may stand beside them."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1, max_length=MAX_NAME)
    data: _Data
    metrics: dict[str, JsonValue]
    versions: dict[str, str] = {}
    seed: int | None = None
    git_commit: str | None = None


def check_record(values: object, *, source: str) -> dict[str, Any]:
    """Give a record as it was read, once every key that is read again is known to be sound.

    Args:
        values: What the file held.
        source: The file, for messages.

    Raises:
        BadArtifact: Names the first key that is missing or of another type.
    """
    if not isinstance(values, dict):
        raise BadArtifact(f"{source} is damaged: it holds no record")
    try:
        _Record.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:3])
        if first["type"] == "missing":
            raise BadArtifact(f"{source} is damaged: it has no {key}") from error
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise BadArtifact(
            f"{source} is damaged: its {key} is {reprlib.repr(first['input'])}, but {reason}"
        ) from error
    return values
