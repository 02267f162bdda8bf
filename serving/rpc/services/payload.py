"""An inference request read around its tensors, which stay where they lie in the message.

Unpacking a message copies each of its bytes fields, and handing one out copies it again: for 60 MiB that is
60 ms in which no other thread runs, and seconds where the elements are listed one by one. Here nothing large
is copied, so that the event loop can read a request of any size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from protos import open_inference_pb2 as pb
from serving.errors import InvalidArgument
from serving.rpc.parts import fields_of

__all__ = ["MAX_FIELDS", "MAX_REST", "Payload", "few_fields_of"]

MAX_FIELDS = 1_024
"""Most fields of one message; 64 MiB of small ones would hold the event loop for a minute."""
MAX_REST = 1 << 16
"""Most bytes of a request, and of an input, beside the elements of tensors."""
_MAX_TENSORS = 8

_INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_CONTENTS = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_BYTES = 2  # the wire type of what has a length


@dataclass(slots=True)
class Payload:
    """A ModelInferRequest."""

    request: pb.ModelInferRequest
    """Without `inputs` and `raw_input_contents`."""
    inputs: list[pb.ModelInferRequest.InferInputTensor] = field(default_factory=list)
    """Without `contents`."""
    contents: list[list[memoryview]] = field(default_factory=list)
    """The parts of each input's InferTensorContents; none where it has none."""
    raw: list[memoryview] = field(default_factory=list)
    """Of `raw_input_contents`."""

    @classmethod
    def read(cls, data: bytes) -> "Payload":
        """Read a message.

        Raises:
            DecodeError: if it is none.
            InvalidArgument: if it has more fields or tensors than any request needs, or is large beside them.
        """
        payload = cls(pb.ModelInferRequest())
        rest: list[memoryview] = []
        for number, wire, value, whole in few_fields_of(memoryview(data)):
            if number == _RAW and wire == _BYTES:
                payload.raw.append(value)
            elif number == _INPUTS and wire == _BYTES:
                payload._read_input(value)
            else:
                rest.append(whole)
        payload.request.MergeFromString(_joined(rest))
        return payload

    def _read_input(self, data: memoryview) -> None:
        if len(self.inputs) == _MAX_TENSORS:
            raise InvalidArgument(
                f"inputs: More than {_MAX_TENSORS} tensors were sent; send images or encoded."
            )
        rest: list[memoryview] = []
        contents: list[memoryview] = []
        for number, wire, value, whole in few_fields_of(data):
            if number == _CONTENTS and wire == _BYTES:
                contents.append(value)
            else:
                rest.append(whole)
        self.inputs.append(pb.ModelInferRequest.InferInputTensor.FromString(_joined(rest)))
        self.contents.append(contents)


def few_fields_of(data: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """Walk over the fields of a message, as `fields_of`, of which there are not many.

    Raises:
        DecodeError: if the bytes are no message.
        InvalidArgument: if it has more than `MAX_FIELDS` fields.
    """
    for count, each in enumerate(fields_of(data)):
        if count == MAX_FIELDS:
            raise InvalidArgument(
                f"A message of the request has more than {MAX_FIELDS:,} fields; send raw_input_contents."
            )
        yield each


def _joined(parts: list[memoryview]) -> bytes:
    if (size := sum(map(len, parts))) > MAX_REST:
        raise InvalidArgument(
            f"The request has {size:,} bytes beside its elements, and at most {MAX_REST:,} are read; "
            "send shorter names and parameters."
        )
    return b"".join(parts)
