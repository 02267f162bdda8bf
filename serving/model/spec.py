"""ModelSpec: what a model file says of itself, and the proof that it is the file that it says.

A model file is one ONNX file. All numbers are in its graph; the rest is one JSON value in its
`metadata_props`, under `KEY`. The fingerprint in it is that of the graph and the weights, so that a file
which was damaged, or edited by another program, is refused before anything runs.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import onnx
from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator
from pydantic_core import from_json

from serving.catalog.catalog import SplitRule
from serving.errors import BadArtifact, NotFound, cause_of
from serving.model.preprocess import RESAMPLINGS

__all__ = [
    "FORMAT_VERSION", "KEY", "MAX_MODEL_BYTES", "ModelSpec", "bare", "fingerprint", "keep_outputs",
    "output_names", "read_model", "read_spec", "write_spec",
]  # fmt: skip

KEY: Final = "crossbatch"
FORMAT_VERSION: Final = 1
MAX_MODEL_BYTES: Final = (1 << 31) - 1
"""What one protobuf message can hold; weights beyond it would need a second file."""
_NOISE: Final = frozenset(("doc_string", "metadata_props"))
_HEX: Final = r"^[0-9a-f]{64}$"


class ModelSpec(BaseModel):
    """What cannot be in the graph: how to prepare images, and where the model comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = Field(default=FORMAT_VERSION, ge=1, description="version of this record's layout")
    name: str = Field(min_length=1, max_length=200, description="what people call the model")
    fingerprint: str = Field(pattern=_HEX, description="SHA-256 of the graph and the weights, in hexadecimal")
    precision: Literal["fp32", "fp16", "int8"] = Field(default="fp32", description="precision of the weights")
    fp32_fingerprint: str | None = Field(
        default=None,
        pattern=_HEX,
        description="fingerprint of the fp32 file it was made from; none for an fp32 file",
    )
    image_size: int = Field(ge=1, le=4096, description="S, the pixels of a side that the model sees")
    crop_fraction: float = Field(
        gt=0, le=1, description="side of the centred square over the shorter side of an image"
    )
    resampling: str = Field(description=f"filter that resizes an image: {', '.join(RESAMPLINGS)}")
    dimension: int = Field(ge=1, le=65_536, description="d, the components of an embedding")
    prototypes: int = Field(ge=0, le=256, description="m, the bins of a histogram; 0 without that output")
    grid: tuple[int, int] | None = Field(
        default=None, description="h and w, the locations that `assignments` has; none without that output"
    )
    backbone: str = Field(default="", description="network that makes the feature map, by its recipe's name")
    pooling: Literal["gap", "gap_gmp", "gem"] = Field(
        default="gap",
        description="how features of all locations become one: their mean, mean plus maximum, or generalised"
        " mean",
    )
    data: str = Field(default="", description="name of the data set that it was trained on")
    split: SplitRule = Field(
        default=SplitRule(), description="rule that says which part of the data set it was trained on"
    )
    classes: int = Field(default=0, ge=0, description="classes that it was trained on")
    images: int = Field(default=0, ge=0, description="images that it was trained on")
    recipe: dict[str, JsonValue] = Field(default={}, description="every setting of the training")
    accuracy: dict[str, JsonValue] = Field(
        default={}, description="what was measured on the run's own data, by part of it; as shares of 1"
    )
    against_fp32: dict[str, JsonValue] = Field(
        default={},
        description="for a file of lower precision, R@1 and MAP@R of the `fp32` file and its `own`, on the"
        " same images, as shares of 1",
    )
    cpu_flags: tuple[str, ...] | None = Field(
        default=None, description="for an int8 file, what the CPU had that measured it, of `CPU_FLAGS`"
    )
    seed: int | None = Field(default=None, description="seed of the training")
    versions: dict[str, str] = Field(default={}, description="versions of the packages that made it")
    git_commit: str | None = Field(default=None, description="commit of the code that trained it")

    @field_validator("resampling")
    @classmethod
    def _known_filter(cls, value: str) -> str:
        if value not in RESAMPLINGS:
            raise ValueError(f"{value!r} is not one of {', '.join(RESAMPLINGS)}")
        return value


def read_spec(path: Path) -> ModelSpec:
    """Read the spec of a model file and prove that the file is the one it describes; see `read_model`."""
    return read_model(path)[1]


def read_model(path: Path) -> tuple[bytes, ModelSpec]:
    """Read the bytes of a model file and its spec, at once, so that what runs is what was proven.

    BadArtifact tells that it is no model file, or its spec is missing, newer or damaged, or its weights are.
    """
    data = _read(path)
    try:
        model = onnx.ModelProto.FromString(data)
    except (DecodeError, RecursionError) as error:
        raise BadArtifact(f"{path} is not an ONNX file, or a damaged one; export or copy it again") from error
    if not model.HasField("graph"):
        raise BadArtifact(f"{path} is not an ONNX file: it holds no graph; give the file that export wrote")
    texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if len(texts) != 1:
        raise BadArtifact(
            f"{path} is an ONNX file with {len(texts)} crossbatch ModelSpecs, and a model has one; "
            "make it with crossbatch export"
        )
    spec = _parse(texts[0], path)
    external = onnx.TensorProto.EXTERNAL
    if any(part.data_location == external for part in _parts(model) if isinstance(part, onnx.TensorProto)):
        raise BadArtifact(f"{path} keeps weights in another file; a model must be one file: export it again")
    found = fingerprint(model)
    if found != spec.fingerprint:
        raise BadArtifact(
            f"{path} is damaged: the fingerprint of its graph and weights is {found[:12]}, and its ModelSpec "
            f"says {spec.fingerprint[:12]}; export or copy it again"
        )
    return data, spec


def write_spec(model: onnx.ModelProto, spec: ModelSpec) -> None:
    """Put `spec`, which must be that of this graph, into the model, in place of all metadata that it has."""
    found = fingerprint(model)
    if found != spec.fingerprint:
        raise BadArtifact(
            f"the ModelSpec of {spec.name} is for the fingerprint {spec.fingerprint[:12]}, "
            f"and the graph has {found[:12]}"
        )
    del model.metadata_props[:]
    model.metadata_props.add(key=KEY, value=spec.model_dump_json())


def fingerprint(model: onnx.ModelProto) -> str:
    """Return the SHA-256 of the graph and the weights in hexadecimal, without what `bare` leaves out."""
    return hashlib.sha256(bare(model).SerializeToString(deterministic=True)).hexdigest()


def bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without what computes nothing: metadata, doc strings, the name of who wrote it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name in ("producer_name", "producer_version", "domain", "model_version"):
        copy.ClearField(name)
    for part in _parts(copy):
        for noise in _NOISE.intersection(part.DESCRIPTOR.fields_by_name):
            part.ClearField(noise)
    return copy


def output_names(data: bytes) -> tuple[str, ...]:
    """Return the names of a model file's outputs, in its own order."""
    return tuple(port.name for port in onnx.ModelProto.FromString(data).graph.output)


def keep_outputs(data: bytes, outputs: Collection[str]) -> bytes:
    """Return a model file with only those outputs and what they need.

    ONNX Runtime computes every node of a graph, whichever outputs are asked for, so what is not to run must
    not be there.
    """
    model = onnx.ModelProto.FromString(data)
    graph, needed, nodes = model.graph, set(outputs), list[onnx.NodeProto]()
    for node in reversed(graph.node):  # in ONNX a node stands behind those it needs
        if needed.intersection(node.output):
            nodes.append(node)
            # A node within a subgraph may take its input from the graph around it.
            for part in _parts(node):
                needed.update(part.input if isinstance(part, onnx.NodeProto) else ())
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    ports = [port for port in graph.output if port.name in outputs]
    kept_fields: dict[str, Sequence[Message]] = {
        "node": nodes[::-1], "initializer": weights, "output": ports, "value_info": (),
    }  # fmt: skip
    for field, kept in kept_fields.items():
        rest = [type(part).FromString(part.SerializeToString()) for part in kept]
        graph.ClearField(field)
        getattr(graph, field).extend(rest)
    return model.SerializeToString()


def _parts(message: Message) -> Iterator[Message]:
    """Yield the message and every message within it, subgraphs and functions too."""
    yield message
    for _, value in message.ListFields():
        if isinstance(value, Message):
            yield from _parts(value)
        elif not isinstance(value, str | bytes | int | float) and value and isinstance(value[0], Message):
            for part in value:
                yield from _parts(part)


def _read(path: Path) -> bytes:
    try:
        found = path.stat()
        if not path.is_file():  # a pipe, say: to open it would wait for its writer
            raise BadArtifact(f"{path} is no file; give the .onnx file that export wrote")
        if found.st_size > MAX_MODEL_BYTES:
            raise BadArtifact(f"{path} has {found.st_size} bytes; a model has at most {MAX_MODEL_BYTES}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"the model file {path} is not there; give the .onnx file of export") from error
    except OSError as error:
        raise BadArtifact(f"the model file {path} cannot be read: {cause_of(error)}") from error


def _parse(text: str, path: Path) -> ModelSpec:
    try:
        values: Any = from_json(text)
    except ValueError as error:
        raise BadArtifact(f"the ModelSpec of {path} is damaged: it is not JSON ({error})") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BadArtifact(
            f"the ModelSpec of {path} has the format version {version}, and this crossbatch reads up to "
            f"{FORMAT_VERSION}; upgrade crossbatch"
        )
    try:
        return ModelSpec.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise BadArtifact(f"the ModelSpec of {path} is damaged: {field}: {first['msg']}") from error
