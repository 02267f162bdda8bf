"""Ways to run a model, by the kind of model that they were found for; workers tell each other by a pipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

if TYPE_CHECKING:
    from serving.model.spec import ModelSpec

__all__ = ["Kind", "Plan", "read_plans", "written_plans"]

_Count = Annotated[int, Field(ge=1, strict=True)]
_NOTHING_ELSE = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to run a model."""

    __pydantic_config__ = _NOTHING_ELSE

    max_batch: _Count
    """Most images in one run."""
    lanes: _Count = 1
    """Runs at once; where there are several, each has one thread."""
    alone_on_all: bool = True
    """Whether all threads work on an image that is alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What two models have in common of which one is run like the other."""

    __pydantic_config__ = _NOTHING_ELSE

    name: str
    """That it is served by."""
    image_size: _Count
    precision: str
    dimension: _Count

    @classmethod
    def of(cls, name: str, spec: "ModelSpec") -> "Kind":
        """Tell the kind of a model that is served by a name."""
        return cls(name, spec.image_size, spec.precision, spec.dimension)


_PLANS = TypeAdapter(list[tuple[Kind, Plan]])


def read_plans(written: Any) -> dict[Kind, Plan]:
    """Take plans from what `written_plans` made.

    Raises:
        ValueError: if it is anything else.
    """
    return dict(_PLANS.validate_python(written))


def written_plans(plans: Mapping[Kind, Plan]) -> Any:
    """Put plans into what JSON has words for."""
    return _PLANS.dump_python(list(plans.items()), mode="json")
