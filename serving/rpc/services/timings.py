"""Where the time of a call went, as it travels."""

import time

from protos import retrieval_service_pb2 as pb
from serving.observability.call import Stages

__all__ = ["timings_of"]


def timings_of(stages: Stages) -> pb.Timings:
    """Write the times of a call as they travel, in whole microseconds."""
    seconds = (stages.decode, stages.queue, stages.encode, stages.gallery, time.monotonic() - stages.began)
    decode, queue, encode, gallery, total = (max(0, round(each * 1e6)) for each in seconds)
    return pb.Timings(decode_us=decode, queue_us=queue, encode_us=encode, gallery_us=gallery, total_us=total)
