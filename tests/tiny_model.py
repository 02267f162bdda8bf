"""A model file of a few nodes, made without torch: the mean colour of a picture, at unit length."""

from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from serving.model.spec import ModelSpec, fingerprint, write_spec

SIZE = 8
DIMENSION = 3


def tiny_graph(*, size: int = SIZE, histograms: bool = True) -> onnx.ModelProto:
    """Images uint8 (B, S, S, 3) to `embeddings` (B, 3); `histograms` fails for any batch but of one."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["pixels", "bias"], ["shifted"]),
        helper.make_node("ReduceMean", ["shifted", "axes"], ["means"], keepdims=0),
        helper.make_node("LpNormalization", ["means"], ["embeddings"], axis=1, p=2),
    ]
    outputs = [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", DIMENSION])]
    if histograms:
        nodes += [
            helper.make_node("Reshape", ["means", "one"], ["row"]),
            helper.make_node("Softmax", ["row"], ["histograms"], axis=1),
        ]
        outputs.append(helper.make_tensor_value_info("histograms", TensorProto.FLOAT, ["batch", DIMENSION]))
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", size, size, 3])],
        outputs,
        [
            helper.make_tensor("bias", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]),
            helper.make_tensor("axes", TensorProto.INT64, [2], [1, 2]),
            helper.make_tensor("one", TensorProto.INT64, [2], [1, DIMENSION]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def tiny_spec(graph: onnx.ModelProto, **changes: Any) -> ModelSpec:
    """The spec of `tiny_graph`."""
    values: dict[str, Any] = {
        "name": "tiny",
        "fingerprint": fingerprint(graph),
        "image_size": SIZE,
        "crop_fraction": 0.875,
        "resampling": "bicubic",
        "dimension": DIMENSION,
        "prototypes": DIMENSION,
    }
    return ModelSpec(**values | changes)


def write_tiny_model(path: Path, graph: onnx.ModelProto | None = None, **changes: Any) -> Path:
    """Write the model file and return its path."""
    graph = graph or tiny_graph()
    write_spec(graph, tiny_spec(graph, **changes))
    path.write_bytes(graph.SerializeToString())
    return path
