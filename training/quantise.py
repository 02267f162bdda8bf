"""An fp32 model file in int8 for CPUs or fp16 for GPUs, and what that costs in retrieval.

Only the backbone is lowered. What makes pixels of bytes and what stands behind the pooling, the head with the
normalisation and the histograms, stay fp32: together they take 2 % of the time of EfficientNet-Lite0.
"""

import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from serving.catalog.catalog import Catalog
from serving.errors import BadArtifact, cause_of
from serving.model.encoder import Encoder, cpu_flags
from serving.model.spec import ModelSpec, fingerprint, keep_outputs, read_model, write_spec
from training.evaluation import evaluate
from training.loop.checkpoint import write_file

__all__ = ["BACKBONE", "FIGURES", "compare", "lower_file", "overflows", "tell_change", "to_fp16", "to_int8"]

Precision = Literal["int8", "fp16"]

BACKBONE: Final = "backbone/"
"""What the names of the backbone's nodes start with."""
FIGURES: Final = ("recall_at_1", "map_at_r")
_LARGEST: Final = float(np.finfo(np.float16).max)
_FP32: Final = ("LayerNormalization", "Softmax")  # ONNX Runtime has no such kernels in int8
_BATCH: Final = 8


def lower_file(
    fp32: Path,
    path: Path,
    precision: Precision,
    photos: Sequence[bytes],
    catalog: Catalog,
    *,
    max_loss: float,
) -> ModelSpec:
    """Write a model file of lower precision than `fp32`, beside which there is room for another file.

    `photos` are files that int8 takes its ranges from. The spec, which is given back, has what `compare`
    finds on the catalogue, the fp32 fingerprint and for int8 the CPU's flags. `BadArtifact`, and no file at
    `path`, if that is a loss of more than `max_loss` points, or ONNX Runtime cannot quantise the graph.
    """
    data, spec = read_model(fp32)
    model = onnx.load_model_from_string(data)
    if precision == "fp16":
        model = to_fp16(model)
    else:
        preprocess = Encoder(fp32).preprocess
        pixels = np.stack([preprocess(photo) for photo in photos])  # (N, S, S, 3)
        model = to_int8(model, pixels, reduce_range=overflows())
    own = {"fingerprint": fingerprint(model), "precision": precision, "fp32_fingerprint": spec.fingerprint}
    spec = spec.model_copy(update=own | {"cpu_flags": cpu_flags() if precision == "int8" else None})
    write_spec(model, spec)
    lowered = fp32.with_name(f"{precision}.onnx")
    lowered.write_bytes(model.SerializeToString())
    found = compare(fp32, lowered, catalog)
    if max(found["fp32"][name] - found["own"][name] for name in FIGURES) > max_loss / 100:
        raise BadArtifact(
            f"the {precision} file was not kept: {tell_change(found)} on {found['images']} images, where a "
            f"loss of {max_loss:g} points is allowed; allow more by --max-loss, take fp32, or for int8 other "
            "images by --calibrate"
        )
    spec = spec.model_copy(update={"against_fp32": found})
    write_spec(model, spec)
    write_file(path, model.SerializeToString())
    return spec


def compare(fp32: Path, lowered: Path, catalog: Catalog) -> dict[str, Any]:
    """Measure two model files on the same unseen classes, as `crossbatch evaluate` does.

    Gives `fp32` and `own`, of each the `FIGURES` as shares of 1, `images`, `queries` and `data`, the name of
    the folder.
    """
    told: dict[str, Any] = {"data": catalog.root.name}
    for name, path in (("fp32", fp32), ("own", lowered)):
        found = evaluate.run(
            evaluate.Settings(
                target=path, data=catalog.root, format=catalog.format, table=catalog.table,
                exclude=list(catalog.exclude), at=[1],
            )
        )  # fmt: skip
        told |= {key: found[key] for key in ("images", "queries")}
        told[name] = {"recall_at_1": found["recall_at"]["1"], "map_at_r": found["map_at_r"]}
    return told


def tell_change(found: Mapping[str, Any]) -> str:
    """Say in percent what `compare` found."""
    told = []
    for name, title in zip(FIGURES, ("R@1", "MAP@R"), strict=True):
        before, after = 100 * found["fp32"][name], 100 * found["own"][name]
        told.append(f"{title} {before:.2f} -> {after:.2f} % ({after - before:+.2f})")
    return ", ".join(told)


def overflows() -> bool:
    """Tell whether this CPU's sums of two 8-bit products overflow 16 bits, as without VNNI on x86."""
    products_in_32_bits = {"avx512_vnni", "avx_vnni", "amx_int8"}
    return platform.machine().lower() in ("x86_64", "amd64") and products_in_32_bits.isdisjoint(cpu_flags())


def to_int8(model: onnx.ModelProto, pixels: NDArray[np.uint8], *, reduce_range: bool) -> onnx.ModelProto:
    """Quantise the backbone: symmetric int8 weights by channel, uint8 activations in the range seen.

    `reduce_range` gives weights 7 bits. Extreme values are kept: on CUB-100 the 99.9th percentile loses four
    times as much MAP@R as the range, and one scale a layer in place of a channel 35 times as much.
    """
    from onnxruntime import quantization  # only here: it is slow to import

    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")  # folded by torch
    del model.graph.value_info[:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "int8.onnx")
        try:
            quantization.quantize_static(
                model,
                path,
                _reader(pixels, quantization.CalibrationDataReader),
                per_channel=True,
                reduce_range=reduce_range,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                nodes_to_exclude=[
                    node.name for node in model.graph.node if not _is_inside(node) or node.op_type in _FP32
                ],
            )
        except Exception as error:  # whatever an operator of the backbone makes it raise
            reason = f"cannot be quantised: {cause_of(error)}; choose another backbone, or fp32"
            raise BadArtifact(f"the network {reason}") from error
        return onnx.load(path)


def to_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Turn the backbone's numbers into fp16, with a cast where they go in and where they come out.

    Not by ONNX Runtime's own converter, which rounds fp32 outputs to fp16 and leaves nodes in no order.
    """
    graph = onnx.shape_inference.infer_shapes(model).graph
    ports = (*graph.value_info, *graph.input, *graph.output)
    floats = {port.name for port in ports if port.type.tensor_type.elem_type == TensorProto.FLOAT}
    weights = {each.name: each for each in model.graph.initializer if each.data_type == TensorProto.FLOAT}
    floats |= weights.keys()
    half, nodes = set[str](), list[onnx.NodeProto]()
    for node in model.graph.node:
        inside = _is_inside(node)
        suffix, wanted = ("_fp16", TensorProto.FLOAT16) if inside else ("_fp32", TensorProto.FLOAT)
        for i, name in enumerate(node.input):
            if name not in floats or (name in half) == inside:
                continue
            node.input[i] = cast = f"{name}{suffix}"
            if cast in floats:
                continue
            floats.add(cast)
            half |= {cast} if inside else set()
            if inside and name in weights:
                numbers = numpy_helper.to_array(weights[name]).clip(-_LARGEST, _LARGEST).astype(np.float16)
                model.graph.initializer.append(numpy_helper.from_array(numbers, cast))
            else:
                nodes.append(helper.make_node("Cast", [name], [cast], name=f"to_{cast}", to=wanted))
        if inside:
            half |= floats.intersection(node.output)
            for attribute in node.attribute:
                if (node.op_type, attribute.name, attribute.i) == ("Cast", "to", TensorProto.FLOAT):
                    attribute.i = TensorProto.FLOAT16
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]  # outlive the graph's
    del model.graph.node[:]
    model.graph.node.extend(copies)
    outputs = [port.name for port in model.graph.output]
    return onnx.load_model_from_string(keep_outputs(model.SerializeToString(), outputs))


def _is_inside(node: onnx.NodeProto) -> bool:
    return node.name.startswith(BACKBONE)


def _reader(pixels: NDArray[np.uint8], base: type) -> Any:
    """Hand out batches in the way that ONNX Runtime asks for them."""
    batches: Iterator[dict[str, Any]] = (
        {"images": pixels[start : start + _BATCH]} for start in range(0, len(pixels), _BATCH)
    )

    class Reader(base):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(batches, None)

    return Reader()
