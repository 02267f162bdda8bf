"""What Prometheus can ask the server."""

from serving.rpc.work.pipeline import Stages

__all__ = ["Metrics"]


class Metrics:
    """Counts and measures; every method is cheap and never fails."""

    def began(self, rpc: str) -> None:
        """Note that a call has come in."""

    def ended(self, rpc: str, code: str, seconds: float) -> None:
        """Note that it has ended with the status of that name."""

    def stages(self, rpc: str, stages: Stages) -> None:
        """Note how long its slowest input spent in each stage."""

    def batch(self, model: str, size: int, seconds: float) -> None:
        """Note one run of a model."""
