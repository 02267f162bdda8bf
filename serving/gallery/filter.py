"""Conditions on an item's label and metadata, which a search can demand of its hits.

A condition names a field: a top-level name of the metadata, or `LABEL`. Where the field holds a list, the
condition holds if it does for any element. Values are strings, booleans or numbers; numbers compare as
doubles, strings by code points, booleans are no numbers, and values of two kinds are never equal.
"""

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["LABEL", "AllOf", "AnyOf", "Equal", "Exists", "Filter", "In", "Not", "Range", "Value"]

LABEL = "$label"
"""The field that stands for an item's label; an item whose label is empty has none."""

Value: TypeAlias = str | bool | int | float


@dataclass(frozen=True, slots=True)
class Equal:
    """The field has this value."""

    field: str
    value: Value


@dataclass(frozen=True, slots=True)
class In:
    """The field has one of these values."""

    field: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The field lies within the bounds given, all numbers or all strings."""

    field: str
    above: str | float | None = None  # >
    least: str | float | None = None  # >=
    below: str | float | None = None  # <
    most: str | float | None = None  # <=


@dataclass(frozen=True, slots=True)
class Exists:
    """The item has the field, whatever it holds; null and an empty list count as not having it."""

    field: str


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every one of the filters holds; with none of them, always."""

    filters: tuple["Filter", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of the filters holds; with none of them, never."""

    filters: tuple["Filter", ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The filter does not hold."""

    filter: "Filter"


Filter: TypeAlias = Equal | In | Range | Exists | AllOf | AnyOf | Not
