"""What is known of the call that the running task works for."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["STAGES", "Call", "Stages", "current_call"]

STAGES = ("decode", "queue", "encode", "gallery")


@dataclass(slots=True)
class Call:
    """Fills up while the call passes; read when it ends."""

    rpc: str
    """Its name, such as RetrievalService/Search."""
    method: str = ""
    """Its whole name, as gRPC has it: /crossbatch.v1.RetrievalService/Search."""
    inputs: int = 0
    """Images, queries or items that were admitted."""
    stages: "Stages | None" = None
    """Where its time went; None when it came to nothing that is measured."""
    began: float = field(default_factory=time.monotonic)
    peer: str = ""
    """Where it came from, asked when it came in: gRPC may not know it any more when it ends."""


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)


@dataclass(slots=True)
class Stages:
    """Seconds that the slowest input of a call spent in each stage.

    The first ones that a task makes for a call are what the call takes note of.
    """

    began: float = field(default_factory=time.monotonic)
    decode: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    gallery: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)
    """The `time.monotonic()` at which each stage of that input began."""

    def __post_init__(self) -> None:
        call = current_call.get()
        if call is not None and call.stages is None:
            call.stages = self

    def spent(self, stage: str, began: float, seconds: float) -> None:
        """Note how long one input was in a stage; the slowest one counts."""
        if seconds >= getattr(self, stage):
            setattr(self, stage, seconds)
            self.starts[stage] = began
