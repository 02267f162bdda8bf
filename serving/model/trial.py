"""A model loaded to be run by the provider that was asked for, or by the fastest that a short trial finds."""

import logging
import time
from pathlib import Path
from typing import Final

import numpy as np

from serving.errors import CrossbatchError
from serving.model.encoder import Encoder, offered_providers
from serving.model.provider import Provider, ProviderChoice

__all__ = ["load_encoder"]

logger = logging.getLogger(__name__)

BATCH: Final = 8
ROUNDS: Final = 5
TOLERANCE: Final = 1e-4
"""Most that a component of an embedding may differ from the CPU's."""


def load_encoder(path: Path | str, *, threads: int = 0, provider: ProviderChoice = "cpu") -> Encoder:
    """Load a model as `Encoder` does; with `auto` for the fastest provider whose embeddings are the CPU's.

    The log tells what the trial has found. A provider that cannot be started, which is an error where it was
    asked for by name, is passed over.
    """
    if provider != "auto":
        return Encoder(path, threads=threads, provider=provider)
    encoder = Encoder(path, threads=threads)
    size = encoder.spec.image_size
    images = np.random.default_rng(0).integers(0, 256, (BATCH, size, size, 3), np.uint8)
    found: dict[Provider, Encoder] = {"cpu": encoder}
    notes: dict[Provider, str] = {}
    for name in offered_providers():
        if name != "cpu":
            try:
                other = Encoder(path, threads=threads, provider=name)
                difference = float(np.abs(other.encode(images) - encoder.encode(images)).max())
            except CrossbatchError as error:
                notes[name] = str(error)
                continue
            if difference <= TOLERANCE:
                found[name] = other
            else:
                notes[name] = f"its embeddings differ from the CPU's by {difference:.1e}"
    seconds = dict.fromkeys(found, float("inf"))
    for _ in range(ROUNDS if len(found) > 1 else 0):
        for name, each in found.items():
            began = time.perf_counter()
            each.encode(images)
            seconds[name] = min(seconds[name], time.perf_counter() - began)
            notes[name] = f"{BATCH / seconds[name]:.0f} images/s"
    best = min(seconds, key=seconds.__getitem__)
    told = "; ".join(f"{name}: {note}" for name, note in notes.items()) or "no other provider is installed"
    logger.info("the model %s is run by %s (%s)", encoder.spec.name, best, told)
    return found[best]
