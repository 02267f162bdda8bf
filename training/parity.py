"""Parity: whether a model file, run as the server runs it, computes what torch computes."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.errors import BadArtifact
from serving.model.encoder import Encoder

__all__ = ["LEAST_IMAGES", "OUTPUTS", "TOLERANCE", "check_parity"]

OUTPUTS: Final = ("embeddings", "histograms", "assignments")
TOLERANCE: Final = 1e-4
"""Largest difference allowed in any component of an embedding or a histogram, in fp32."""
LEAST_IMAGES: Final = 6
"""For batches of one, of two and of three."""
_BATCH: Final = 15


def check_parity(
    encoder: Encoder, network: Callable[[Tensor], Sequence[Tensor]], images: Sequence[bytes]
) -> float:
    """Compare a model file and the network it was made from, in batches of one, of two and of odd numbers.

    Args:
        encoder: The file, as it is served.
        network: uint8 (B, S, S, 3) to all `OUTPUTS` or to the first alone, on the CPU.
        images: Image files; `LEAST_IMAGES` make up the first three batches.

    Returns:
        The largest difference in any component.

    Raises:
        BadArtifact: It is more than `TOLERANCE`, not finite, or assignments differ.
    """
    largest, done, sizes = 0.0, 0, itertools.chain((1, 2, 3), itertools.repeat(_BATCH))
    while done < len(images):
        data = images[done : done + next(sizes)]
        done += len(data)
        batch = np.stack([encoder.preprocess(each) for each in data])  # (B, S, S, 3)
        with torch.no_grad():
            outputs = [output.numpy() for output in network(torch.from_numpy(batch))]
        wanted = dict(zip(OUTPUTS, outputs, strict=False))
        found = encoder.run(batch, *wanted)
        for name in OUTPUTS[: min(2, len(wanted))]:
            largest = max(largest, _difference(found[name], wanted[name], name))
        if "assignments" in wanted:
            _check_assignments(found["assignments"], wanted["assignments"])
    return largest


def _difference(found: NDArray[np.float32], wanted: NDArray[np.float32], name: str) -> float:
    difference = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else float("nan")
    if not difference <= TOLERANCE:  # nor NaN
        raise BadArtifact(
            f"the exported file was not kept: its {name} {found.shape} differ from torch's {wanted.shape} by "
            f"{difference:.2g}, where {TOLERANCE:g} is allowed; its backbone may not be exportable"
        )
    return difference


def _check_assignments(found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> None:
    """Allow one location, or one in a hundred, where two prototypes are as near as rounding goes."""
    different = int((found != wanted).sum()) if found.shape == wanted.shape else found.size
    if different > max(1, found.size // 100):
        raise BadArtifact(
            f"the exported file was not kept: its assignments {found.shape} differ from torch's "
            f"{wanted.shape} in {different} of {found.size} locations"
        )
