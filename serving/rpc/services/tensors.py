"""The tensors of the Open Inference Protocol: read from a request and checked, and written for a reply."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protos import open_inference_pb2 as pb
from serving.rpc.limits import MAX_INPUTS
from serving.rpc.services.payload import Payload, few_fields_of
from serving.rpc.status import refusal

__all__ = ["INPUTS", "OUTPUTS", "Given", "given_in", "images_of", "wanted_outputs", "write_outputs"]

INPUTS = {"images": "UINT8", "encoded": "BYTES"}
"""The type of each input; a request has one of them."""
OUTPUTS = ("embeddings", "histograms", "assignments")

_LISTS = {"UINT8": "uint_contents", "BYTES": "bytes_contents"}
_NUMBERS = {name: field.number for name, field in pb.InferTensorContents.DESCRIPTOR.fields_by_name.items()}
_PIECE = 1 << 18  # no step takes longer than another thread may have to wait
_UNSERVED = ("shared_memory_region", "classification")

Images: TypeAlias = NDArray[np.uint8] | list[bytes]
"""Pixels, uint8 (B, S, S, 3), RGB; or B encoded images."""


@dataclass(frozen=True, slots=True)
class Given:
    """The one input of a request, with everything but its elements checked."""

    name: Literal["images", "encoded"]
    shape: tuple[int, ...]
    raw: memoryview | None
    """Its elements as they lie in the message; None when they are listed."""
    listed: Sequence[memoryview]
    """The parts of its InferTensorContents."""

    @property
    def count(self) -> int:
        """B, the images."""
        return self.shape[0]

    @property
    def size(self) -> int:
        """The bytes that the elements take in the message."""
        return len(self.raw) if self.raw is not None else sum(map(len, self.listed))


def given_in(payload: Payload, side: int) -> Given:
    """Find and check the input of a request; looks at no element, so it takes no time.

    Args:
        payload: The request.
        side: S, the pixels of a side that the model sees.

    Raises:
        Refusal: if there is none, or more than one, or one that is not as the model's metadata says.
    """
    tensors, raw = payload.inputs, payload.raw
    _check_names([tensor.name for tensor in tensors])
    tensor, listed = tensors[0], payload.contents[0]
    name: Literal["images", "encoded"] = "images" if tensor.name == "images" else "encoded"
    if tensor.datatype != INPUTS[name]:
        raise refusal(
            "inputs[0].datatype",
            f"The tensor {name} is {INPUTS[name]}, and {tensor.datatype[:20]!r} was sent.",
        )
    shape = _checked_shape(name, tensor.shape, side)
    _check_parameters(f"inputs[0].parameters of {name}", tensor.parameters)
    if raw and listed:
        raise refusal(
            "inputs[0].contents", f"The tensor {name} is there and in raw_input_contents too; send it once."
        )
    if len(raw) > 1:
        raise refusal(
            "raw_input_contents", f"{len(raw)} are there for the one tensor {name}; send one for each tensor."
        )
    if not raw and not listed:
        raise refusal("inputs[0]", f"The tensor {name} has no elements; send them in raw_input_contents.")
    return Given(name, shape, raw[0] if raw else None, listed)


def images_of(given: Given) -> Images:
    """Take the images out of a request. Raw pixels are not copied; all else is, and takes time.

    Raises:
        Refusal: if there are fewer or more elements than the shape says, or of another type.
    """
    if given.name == "images":
        values = np.frombuffer(given.raw, np.uint8) if given.raw is not None else _listed_values(given)
        _check_count(
            given, len(values), "raw_input_contents[0]" if given.raw is not None else "inputs[0].contents"
        )
        return values.reshape(given.shape)
    if given.raw is not None:
        return _prefixed(given, given.raw)
    images = [bytes(each) for each in _listed(given)]
    _check_count(given, len(images), "inputs[0].contents")
    return images


def wanted_outputs(
    asked: Sequence[pb.ModelInferRequest.InferRequestedOutputTensor], *, prototypes: int
) -> list[str]:
    """Check which outputs a request asks for.

    Args:
        asked: They, as they came.
        prototypes: m; a model with none has embeddings alone.

    Returns:
        Their names, in the order of the request.

    Raises:
        Refusal: if one is not there, or there twice.
    """
    served = OUTPUTS if prototypes else OUTPUTS[:1]
    names: list[str] = []
    for i, output in enumerate(asked):
        place = f"outputs[{i}]"
        if output.name not in served:
            raise refusal(
                place, f"There is no output {output.name[:80]!r}; the model has {', '.join(served)}."
            )
        if output.name in names:
            raise refusal(place, f"The output {output.name} is asked for twice; ask once.")
        _check_parameters(f"{place}.parameters of {output.name}", output.parameters)
        names.append(output.name)
    return names or ["embeddings"]


def write_outputs(reply: pb.ModelInferResponse, arrays: dict[str, NDArray[Any]], *, raw: bool) -> None:
    """Add tensors to a reply.

    Args:
        reply: Takes them.
        arrays: By name, float32 or uint8, in order.
        raw: Whether as bytes, or else as lists of elements.
    """
    for name, array in arrays.items():
        tensor = reply.outputs.add(name=name, shape=array.shape)
        tensor.datatype = "UINT8" if array.dtype == np.uint8 else "FP32"
        if raw:
            reply.raw_output_contents.append(
                array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
            )
        elif array.dtype == np.uint8:
            tensor.contents.uint_contents.extend(array.ravel().tolist())
        else:
            tensor.contents.fp32_contents.extend(array.ravel().tolist())


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise refusal("inputs", "No tensor was sent; send images or encoded.")
    for i, name in enumerate(names):
        if name not in INPUTS:
            raise refusal(
                f"inputs[{i}].name", f"There is no input {name[:80]!r}; the model takes images or encoded."
            )
        if name in names[:i]:
            raise refusal(f"inputs[{i}].name", f"The tensor {name} is there twice; send it once.")
    if len(names) > 1:
        raise refusal("inputs", "Both images and encoded were sent; send one of the two.")


def _checked_shape(name: str, shape: Sequence[int], side: int) -> tuple[int, ...]:
    found = tuple(shape[:5])
    fits = found[1:] == (side, side, 3) if name == "images" else found[1:] in ((), (1,))
    if not found or not fits or not 1 <= found[0] <= MAX_INPUTS:
        wanted = f"[B, {side}, {side}, 3]" if name == "images" else "[B] or [B, 1]"
        told = ", ".join(map(str, found)) + (", ..." if len(shape) > len(found) else "")
        raise refusal(
            "inputs[0].shape",
            f"The tensor {name} takes {wanted} with B from 1 to {MAX_INPUTS}, and [{told}] was sent.",
        )
    return found


def _check_parameters(place: str, parameters: Any) -> None:
    for name in _UNSERVED:
        if name in parameters:
            raise refusal(place, f"The parameter {name} is not served; send and take whole tensors.")


def _check_count(given: Given, found: int, place: str) -> None:
    wanted = prod(given.shape)
    if found != wanted:
        told = ", ".join(map(str, given.shape))
        raise refusal(
            place, f"The tensor {given.name} of shape [{told}] has {wanted:,} elements, and {found:,} came."
        )


def _prefixed(given: Given, raw: memoryview) -> list[bytes]:
    """Elements of which each stands after its length in four bytes, little-endian."""
    images: list[bytes] = []
    place = 0
    while place < len(raw):
        start = place + 4
        place = start + int.from_bytes(raw[place:start], "little")
        if start > len(raw) or place > len(raw):
            raise refusal(
                "raw_input_contents[0]",
                f"The tensor encoded ends within element {len(images)}; put its length in 4 bytes, "
                "little-endian, before each.",
            )
        if len(images) == given.count:
            raise refusal(
                "raw_input_contents[0]",
                f"The tensor encoded has more than the {given.count} elements that its shape says.",
            )
        images.append(bytes(raw[start:place]))
    _check_count(given, len(images), "raw_input_contents[0]")
    return images


def _listed_values(given: Given) -> NDArray[np.uint8]:
    """The listed elements of a UINT8 tensor, (n,)."""
    values = [_unpacked(each) for each in _listed(given)]
    return values[0] if len(values) == 1 else np.concatenate([np.zeros(0, np.uint8), *values])


def _listed(given: Given) -> list[memoryview]:
    """The values of the one list that is for a tensor's type."""
    kind = INPUTS[given.name]
    values: list[memoryview] = []
    for part in given.listed:
        try:
            for number, wire, value, _ in few_fields_of(part):
                if number != _NUMBERS[_LISTS[kind]] or wire not in ((2,) if kind == "BYTES" else (0, 2)):
                    raise ValueError(f"field {number} is there")
                values.append(value)
        except (DecodeError, ValueError) as error:
            raise refusal(
                "inputs[0].contents",
                f"The elements of the tensor {given.name} are not all in {_LISTS[kind]}: {error}.",
            ) from error
    return values


def _unpacked(data: memoryview) -> NDArray[np.uint8]:
    """Packed varints of 0 to 255 as uint8 (n,).

    One below 128 is the byte itself. Others are two bytes: the low seven bits beside a mark that another byte
    follows, which has the value of the eighth, and then a 1. So the first byte is the number in either case.
    """
    coded = np.frombuffer(data, np.uint8)
    values: list[NDArray[np.uint8]] = []
    wrong = bool(len(coded) and coded[-1] >= 128)
    for start in range(0, len(coded), _PIECE):
        part = coded[start : start + _PIECE]
        follows = np.empty(len(part), bool)
        follows[0] = start > 0 and coded[start - 1] >= 128
        np.greater_equal(part[:-1], 128, out=follows[1:])
        wrong = wrong or bool((follows & (part != 1)).any())
        values.append(part[~follows])
    if wrong:
        raise refusal("inputs[0].contents", "The tensor images has an element above 255, which is no UINT8.")
    return np.concatenate([np.zeros(0, np.uint8), *values])
