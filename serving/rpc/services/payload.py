"""An inference request read around its tensors, which stay where they lie in the message.

Unpacking a message copies each of its bytes fields, and handing one out copies it again: for 60 MiB that is
60 ms in which no other thread runs, and seconds where the elements are listed one by one. Here nothing large
is copied, so that the event loop can read a request of any size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from protos import open_inference_pb2 as pb
from serving.errors import InvalidArgument

__all__ = ["MAX_FIELDS", "MAX_REST", "Payload", "fields_of"]

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
            ValueError: if it is none.
            DecodeError: if what is beside the tensors cannot be unpacked.
            InvalidArgument: if it has more fields or tensors than any request needs, or is large beside them.
        """
        payload = cls(pb.ModelInferRequest())
        rest: list[memoryview] = []
        for number, wire, value, whole in fields_of(memoryview(data)):
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
        for number, wire, value, whole in fields_of(data):
            if number == _CONTENTS and wire == _BYTES:
                contents.append(value)
            else:
                rest.append(whole)
        self.inputs.append(pb.ModelInferRequest.InferInputTensor.FromString(_joined(rest)))
        self.contents.append(contents)


def fields_of(data: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """Walk over the fields of a message.

    Args:
        data: The message, bytes.

    Yields:
        The number of a field, its wire type, its value, and the whole of it, with what leads to the value.

    Raises:
        ValueError: if the message is none.
        InvalidArgument: if it has more than `MAX_FIELDS` fields.
    """
    place = count = 0
    while place < len(data):
        count += 1
        if count > MAX_FIELDS:
            raise InvalidArgument(
                f"A message of the request has more than {MAX_FIELDS:,} fields; send raw_input_contents."
            )
        began = place
        tag, place = _varint(data, place)
        start = place
        match tag & 7:
            case 0:
                _, place = _varint(data, place)
            case 1:
                place += 8
            case 2:
                length, start = _varint(data, place)
                place = start + length
            case 5:
                place += 4
            case wire:
                raise ValueError(f"a field of wire type {wire}")
        if place > len(data):
            raise ValueError("a field that goes on after the message ends")
        yield tag >> 3, tag & 7, data[start:place], data[began:place]


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    number = 0
    for i, byte in enumerate(data[place : place + 10]):
        number |= (byte & 127) << (7 * i)
        if byte < 128:
            return number, place + i + 1
    raise ValueError("a number that does not end")


def _joined(parts: list[memoryview]) -> bytes:
    if (size := sum(map(len, parts))) > MAX_REST:
        raise InvalidArgument(
            f"The request has {size:,} bytes beside its elements, and at most {MAX_REST:,} are read; "
            "send shorter names and parameters."
        )
    return b"".join(parts)
