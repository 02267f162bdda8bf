"""Every RPC that the protos tell of, and requests for it that may well be right."""

import importlib
import pkgutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import protos
from benchmarks.driving.messages import INFER, infer

__all__ = ["GALLERIES", "Method", "methods", "request"]

GALLERIES: Final = ("fuzz", "fuzz-other")
"""Galleries that requests name, with one that is not there."""
_NAMES: Final = ("missing", "", "UPPER", "../up", "a" * 65)
_TEXTS: Final = ("a", "b", "item-1", "item-2", "$label", "colour")
_ODD_TEXTS: Final = ("", "é", "x" * 1100, "a\x00b")
_NUMBERS: Final = (0, 1, 2, 10)
_ODD_NUMBERS: Final = (255, 256, 257, 1000, 1001, 65_536, (1 << 31) - 1)
_REALS: Final = (0.5, 0.9, 1.0)
_ODD_REALS: Final = (0.0, -1.0, 1e308, float("nan"), float("inf"), -0.0)
_ODDITY: Final = (0.0, 0.0, 0.02, 0.1, 0.4)
"""How much of a request may be beyond what a field takes, of which one is drawn for each."""
_DEEPEST: Final = 5
_TENSORS: Final = 0.6
_ENDLESS: Final = {"Watch"}  # of the health service: ends with its client


T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """An RPC."""

    path: str
    """As gRPC names it."""
    request: Descriptor
    takes_stream: bool
    weight: float
    """How often it is called beside others."""

    @property
    def name(self) -> str:
        """Its name alone."""
        return self.path.rpartition("/")[2]


_RARE: Final = {
    "ReloadModels": 0.02,
    "BuildIndex": 0.2,
    "CreateGallery": 0.2,
    "DeleteGallery": 0.05,
    "SwitchGallery": 0.2,
    "RollbackGallery": 0.2,
}


def methods() -> list[Method]:
    """Return every RPC of every proto of ours, of health and of reflection, in a fixed order."""
    names = [found.name for found in pkgutil.iter_modules(protos.__path__) if found.name.endswith("_pb2")]
    modules: list[Any] = [importlib.import_module(f"protos.{name}") for name in names]
    services = {
        service.full_name: service
        for module in (health_pb2, reflection_pb2, *modules)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    return [
        _method(method)
        for _, service in sorted(services.items())
        for method in service.methods
        if method.name not in _ENDLESS
    ]


def _method(method: MethodDescriptor) -> Method:
    return Method(
        path=f"/{method.containing_service.full_name}/{method.name}",
        request=method.input_type,
        takes_stream=method.client_streaming,
        weight=_RARE.get(method.name, 1.0),
    )


def request(random: Random, method: Method, images: Sequence[bytes], vector: bytes, model: str) -> bytes:
    """Return a request with every field likely to be set to what it takes, or to what is just beyond.

    Args:
        random: Decides.
        method: Whose it is.
        images: For fields that take one.
        vector: For fields that take one.
        model: Name of a model that is served.
    """
    if method.path == INFER and random.random() < _TENSORS:  # whose fields have to agree with one another
        image = random.choice(images)
        return infer(model, "encoded", "BYTES", [1], struct.pack("<I", len(image)) + image)
    filled = _Filler(random, images, vector, model).message(method.request, 0)
    data: bytes = filled.SerializeToString()
    return data


class _Filler:
    """Fills messages by the names and types of their fields."""

    def __init__(self, random: Random, images: Sequence[bytes], vector: bytes, model: str) -> None:
        self._random = random
        self._oddity = random.choice(_ODDITY)
        self._images = images
        self._vector = vector
        self._model = model

    def message(self, kind: Descriptor, depth: int) -> Any:
        made = message_factory.GetMessageClass(kind)()
        for field in kind.fields:
            # A field that only demands something of the others is left out more often.
            likely = 0.2 if "expected" in field.name or field.name in ("filter", "minimum_score") else 0.85
            if self._random.random() < likely - 0.1 * depth:
                self._fill(made, field, depth)
        return made

    def _fill(self, made: Any, field: FieldDescriptor, depth: int) -> None:
        nested = field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            self._map(made, field, depth)
        elif nested is not None and depth >= _DEEPEST:
            return
        elif field.is_repeated:
            values = [self._value(made, field, depth) for _ in range(self._random.choice((0, 1, 1, 2, 3)))]
            getattr(made, field.name).extend(values)
        elif nested is not None:
            getattr(made, field.name).CopyFrom(self._value(made, field, depth))
        else:
            setattr(made, field.name, self._value(made, field, depth))

    def _map(self, made: Any, field: FieldDescriptor, depth: int) -> None:
        if depth >= _DEEPEST:
            return
        entry = field.message_type.fields_by_name["value"]
        key = self._random.choice(("colour", "price", "é"))
        if entry.message_type is not None:
            getattr(made, field.name)[key].CopyFrom(self.message(entry.message_type, depth + 1))
        else:
            getattr(made, field.name)[key] = self._value(made, entry, depth)

    def _value(self, made: Any, field: FieldDescriptor, depth: int) -> Any:
        random = self._random
        if field.message_type is not None:
            return self.message(field.message_type, depth + 1)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes(field.name)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._text(field)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return random.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return self._either(_REALS, _ODD_REALS)
        if field.type == FieldDescriptor.TYPE_ENUM:
            return random.choice(list(field.enum_type.values_by_number))
        return self._either(_NUMBERS, _ODD_NUMBERS)

    def _either(self, usual: Sequence[T], odd: Sequence[T]) -> T:
        return self._random.choice(odd if self._random.random() < self._oddity else usual)

    def _bytes(self, name: str) -> bytes:
        random = self._random
        if random.random() < self._oddity:
            return random.choice((random.randbytes(random.randrange(20)), self._vector, b""))
        if "vector" in name:
            return self._vector
        image = random.choice(self._images)
        return struct.pack("<I", len(image)) + image if "raw" in name else image

    def _text(self, field: FieldDescriptor) -> str:
        within = field.containing_type.full_name
        if within.startswith("inference.") and field.name in ("model_name", "name", "datatype"):
            return self._either(
                (self._model, "images", "encoded", "UINT8", "BYTES"), ("FP32", "embeddings", "")
            )
        if "model" in field.name:
            return self._either(("", self._model), ("missing",))
        if field.name == "index":
            return self._either(("", "auto", "exact", "Flat"), ("nonsense", "HNSW4"))
        if field.name in ("gallery", "other") or within.endswith("GalleryRequest") or "BuildIndex" in within:
            return self._either(GALLERIES, _NAMES)
        if field.name in ("page_token", "key_prefix"):
            return self._either(("",), _TEXTS)
        return self._either(_TEXTS, _ODD_TEXTS)
