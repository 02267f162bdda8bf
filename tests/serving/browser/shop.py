"""What the browser looks at: models of a few nodes, galleries by them, a map, and names made to do harm."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from serving.client.client import Client
from serving.client.records import Item
from serving.gallery import command
from tests.tiny_model import write_tiny_model
from training.data.drawing import draw_product, products

SIZE, LOCATIONS, PROTOTYPES = 32, 8, 12
PRODUCTS, PICTURES = 12, 6
SHOP, OTHER, EDITED, HOSTILE = "products", "colours", "edited", "hostile"
RIGHT_TO_LEFT = "\u202egpj.kcart\u202c"
MARKUP = "<img src=x onerror=alert(1)>"
SCRIPT = "\"'><script>alert(2)</script>"
NAMES = [
    MARKUP,
    SCRIPT,
    "javascript:alert(3)",
    RIGHT_TO_LEFT,
    "=1+2",
    "a/b/../c?d#e&f=%2f",
    "x" * 400,
    "{{7*7}}${7*7}",
]


def write_model(path: Path, *, cells: int, prototypes: int) -> Path:
    """Embed a picture by the mean colours of `cells` x `cells` squares; prototypes are colours."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["pixels", "unit"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["planes"], perm=[0, 3, 1, 2]),
        _pool("means", cells),
        helper.make_node("Flatten", ["means"], ["row"]),
        helper.make_node("Add", ["row", "shift"], ["shifted"]),
        helper.make_node("LpNormalization", ["shifted"], ["embeddings"], axis=1, p=2),
    ]
    dimension = 3 * cells * cells
    outputs = [_port("embeddings", TensorProto.FLOAT, dimension)]
    weights: dict[str, Any] = {"unit": np.float32(1 / 255), "shift": np.full(dimension, -0.47, np.float32)}
    if prototypes:
        colours = np.random.default_rng(4).random((prototypes, 3)).astype(np.float32)
        nodes += [  # nearest: |c - p|² = |c|² - 2 (c·p - |p|² / 2)
            _pool("local", LOCATIONS),
            helper.make_node("Conv", ["local", "colours", "bias"], ["likeness"]),
            helper.make_node("Softmax", ["likeness"], ["shares"], axis=1),
            helper.make_node("ReduceMean", ["shares", "axes"], ["histograms"], keepdims=0),
            helper.make_node("ArgMax", ["likeness"], ["nearest"], axis=1, keepdims=0),
            helper.make_node("Cast", ["nearest"], ["assignments"], to=TensorProto.UINT8),
        ]
        outputs += [
            _port("histograms", TensorProto.FLOAT, prototypes),
            _port("assignments", TensorProto.UINT8, LOCATIONS, LOCATIONS),
        ]
        weights["colours"] = 40 * colours[:, :, None, None]
        weights["bias"] = -20 * (colours**2).sum(axis=1)
        weights["axes"] = np.array([2, 3])
    graph = helper.make_graph(
        nodes,
        path.stem,
        [_port("images", TensorProto.UINT8, SIZE, SIZE, 3)],
        outputs,
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    grid = (LOCATIONS, LOCATIONS) if prototypes else None
    told = {
        "name": path.stem,
        "image_size": SIZE,
        "dimension": dimension,
        "prototypes": prototypes,
        "grid": grid,
    }
    return write_tiny_model(path, model, **told)


def _pool(name: str, cells: int) -> onnx.NodeProto:
    side = [SIZE // cells] * 2
    return helper.make_node("AveragePool", ["planes"], [name], kernel_shape=side, strides=side)


def _port(name: str, kind: int, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["batch", *shape])


def drawn(number: int, picture: int, size: int = 72) -> bytes:
    """A JPEG of a made-up product."""
    rng = np.random.default_rng([number, picture])
    file = io.BytesIO()
    draw_product(products(PRODUCTS)[number], rng, size=size).save(file, "JPEG", quality=88)
    return file.getvalue()


def stock() -> list[Item]:
    """72 pictures of 12 products, with metadata of each kind."""
    items = []
    for number, product in enumerate(products(PRODUCTS)):
        for picture in range(PICTURES):
            metadata: dict[str, Any] = {
                "colour": product.colour, "price": 10 * number + picture + 0.5, "sold": picture % 2 == 0,
                "tags": [product.texture, "new"] if picture else ["old"], "size": {"width": picture},
            }  # fmt: skip
            key, label = f"{number:02}/{picture}.jpg", f"{product.colour} {product.shape} {number}"
            items.append(Item(key, drawn(number, picture), None, label, f"https://shop.test/{key}", metadata))
    items.append(Item("again.jpg", drawn(3, 3), None, items[21].label))  # the same picture as 03/3.jpg
    return items


def hostile() -> list[Item]:
    """Each name as key, label, URI, field and value."""
    return [
        Item(name, drawn(number, 0), None, name, name, {name[:100]: name, "kind": name})
        for number, name in enumerate(NAMES)
    ]


def fill(address: str, galleries: Path) -> None:
    """Make the galleries, and the map of the first one as `crossbatch gallery map` does."""
    with Client(address) as client:
        for name, model, items in (
            (SHOP, "layout", stock()),
            (OTHER, "colour", stock()),
            (EDITED, "layout", stock()[:6]),
            (HOSTILE, "layout", hostile()),
        ):
            client.create(name, model=model, thumbnail_side=72)
            client.upsert(name, items)
    for name in (SHOP, HOSTILE):
        words: dict[str, Any] = {"action": "map", "name": name, "galleries": galleries}
        command.run(command.Settings.model_validate(words))


def models(folder: Path) -> Sequence[Path]:
    """`layout`, which has prototypes, and `colour`, which has none."""
    return (
        write_model(folder / "layout.onnx", cells=4, prototypes=PROTOTYPES),
        write_model(folder / "colour.onnx", cells=2, prototypes=0),
    )
