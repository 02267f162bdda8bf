"""What a model sees in an image, as it travels."""

import numpy as np

from protos import retrieval_service_pb2 as pb
from serving.engine.explanation import Explanation
from serving.rpc.status import to_status
from serving.rpc.wire import bytes_of

__all__ = ["explain_result"]


def explain_result(outcome: Explanation | Exception) -> pb.ExplainResult:
    """Write an explanation, or why there is none."""
    if isinstance(outcome, Exception):
        return pb.ExplainResult(error=to_status(outcome))
    height, width = outcome.assignments.shape
    return pb.ExplainResult(
        histogram=bytes_of(outcome.histogram),
        assignments=np.ascontiguousarray(outcome.assignments, dtype=np.uint8).tobytes(),
        height=height,
        width=width,
    )
