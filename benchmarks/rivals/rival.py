"""Another server of the same model, seen from here: how it is started, and what is sent to it."""

import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from benchmarks.driving import messages
from benchmarks.driving.client import Client, Target
from benchmarks.driving.plain import Plain
from benchmarks.driving.served import ROOT, Failed, Served
from benchmarks.rivals.onnx_model import Order

__all__ = ["SETTINGS", "Rival", "answer", "check", "requests", "start", "tuned"]

_TOLERANCE: Final = 1e-4
_PATIENCE: Final = 30.0
SETTINGS: Final = {
    "triton": [(8, 0.0, 0), (16, 1.0, 0), (32, 2.0, 0), (32, 5.0, 0), (64, 2.0, 0)],
    "mlserver": [(8, 1.0, 0), (16, 2.0, 0), (32, 2.0, 0), (32, 5.0, 0), (32, 2.0, 1)],
}
"""Largest batch, longest wait in milliseconds and processes that are tried of each."""


@dataclass(frozen=True)
class Rival:
    """A server of a kind in its own environment."""

    kind: str
    """"triton" or "mlserver"."""
    python: Path
    order: Order

    @property
    def title(self) -> str:
        """What its row is called."""
        return f"{self.kind}, {'images' if self.order.encoded else 'tensors'}"

    @property
    def setting(self) -> str:
        """How it is set, in words."""
        order = self.order
        processes = f", {order.workers} processes" if order.workers else ""
        return f"batches of up to {order.max_batch}, {order.delay_ms:g} ms{processes}"


def start(rival: Rival, log: Path) -> Served:
    """Start it.

    Raises:
        Failed: It does not start.
    """
    script = ROOT / "benchmarks" / "rivals" / f"{rival.kind}_server.py"
    environment = {"PYTHONPATH": str(ROOT)}  # and nothing of this process's own
    if rival.kind == "triton":
        # Its stub would load the system's libpython, which may be of another patch release.
        library = f"{_base(rival.python)}/lib"
        known = filter(None, [library, os.environ.get("LD_LIBRARY_PATH")])
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(known)
    return Served([str(rival.python), str(script), rival.order.to_json()], log, environment=environment)


def requests(order: Order, images: Sequence[bytes], plain: Plain) -> list[bytes]:
    """Return the request of each image: itself, or the pixels that it decodes to."""
    if order.encoded:
        return [
            messages.infer("model", "images", "BYTES", [1, 1], struct.pack("<I", len(each)) + each)
            for each in images
        ]
    pixels = (plain.encoder.preprocess(each) for each in images)
    return [messages.infer("model", "images", "UINT8", [1, *each.shape], each.tobytes()) for each in pixels]


def answer(reply: bytes) -> NDArray[np.float32]:
    """Return the one float32 tensor of a ModelInferResponse, raw or not, flat."""
    found = messages.fields(reply)
    if 6 in found:
        return np.frombuffer(found[6][0], "<f4")
    contents = messages.fields(messages.fields(found[5][0])[5][0])
    return np.frombuffer(contents[6][0], "<f4")


def check(address: str, some: Sequence[bytes], expected: NDArray[np.float32]) -> None:
    """Prove that a server answers requests with the embeddings that are expected, float32 (B, d).

    Raises:
        Failed: It does not.
    """
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(messages.INFER)
        try:
            found = np.stack([answer(call(each, timeout=_PATIENCE)) for each in some])
        except grpc.RpcError as error:
            status: Any = error
            raise Failed(f"{status.code().name}: {status.details()}") from error
    apart = np.abs(found - expected).max()
    if not apart <= _TOLERANCE:
        raise Failed(f"its embeddings differ from those of the plain loop by {apart:.2g}")


def tuned(
    rival: Rival, client: Client, requested: Path, log: Path, *, in_flight: Sequence[int], seconds: float
) -> Rival:
    """Return it with the setting of the highest images a second, as the geometric mean of all levels.

    Raises:
        Failed: It starts with none of them.
    """
    best: tuple[float, Rival] | None = None
    reason = ""
    for max_batch, delay, workers in SETTINGS[rival.kind]:
        order = replace(rival.order, max_batch=max_batch, delay_ms=delay, workers=workers)
        one = replace(rival, order=order)
        try:
            with start(one, log) as served:
                target = Target(served.address, messages.INFER, requested)
                client.closed(target, in_flight=max(in_flight), seconds=min(1.0, seconds))
                rates = [_rate(client, target, number, seconds) for number in in_flight]
        except Failed as error:
            reason = str(error)
            continue
        mean = float(np.exp(np.log(np.maximum(rates, 1e-9)).mean()))
        if best is None or mean > best[0]:
            best = mean, one
    if best is None:
        raise Failed(reason)
    return best[1]


def _rate(client: Client, target: Target, in_flight: int, seconds: float) -> float:
    told = client.closed(target, in_flight=in_flight, seconds=seconds)
    good: int = told["codes"].get("OK", 0)
    return good / float(told["seconds"])


def _base(python: Path) -> str:
    """Return where the interpreter of an environment is installed.

    Raises:
        Failed: It cannot be run.
    """
    words = [str(python), "-c", "import sys; print(sys.base_prefix)"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"{python} cannot be run: {error}") from error
