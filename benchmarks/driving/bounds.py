"""The bounds of a benchmark: what is said of each, and the exit status that comes of all."""

import math

__all__ = ["NOT_MET", "Bounds", "verdict"]

NOT_MET = "NOT MET"


class Bounds:
    """Prints whether each bound was met, and remembers whether all were."""

    def __init__(self) -> None:
        """Begin with none."""
        self._missed = False

    @property
    def status(self) -> int:
        """The exit status of the benchmark: 1 where a bound was not met, 0 otherwise."""
        return int(self._missed)

    def hold(self, what: str, value: float, bound: float, *, most: bool = False, unit: str = "") -> None:
        """Print the verdict on a figure, as `verdict` has it."""
        self.note(verdict(what, value, bound, most=most, unit=unit))

    def note(self, line: str) -> None:
        """Print a line that says whether a bound was met, if it is on one."""
        print(line)
        self._missed |= line.endswith(NOT_MET)


def verdict(what: str, value: float, bound: float, *, most: bool = False, unit: str = "") -> str:
    """Return a line that says whether a bound was met; one that could not be measured is not.

    Args:
        what: Was measured.
        value: What it came to; NaN where it could not be measured.
        bound: The least that it may be.
        most: Whether it is the most instead.
        unit: Of both.
    """
    met = value <= bound if most else value >= bound
    told = "not measured" if math.isnan(value) else f"{value:.3f}{unit}"
    return f"- {what}: {told}, bound {'<=' if most else '>='} {bound:g}{unit}: {'met' if met else NOT_MET}"
