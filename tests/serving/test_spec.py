"""What a model file says of itself, and each way in which it can be wrong."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.catalog.catalog import SplitRule
from serving.errors import BadArtifact, NotFound
from serving.model import spec as module
from serving.model.preprocess import FORMATS, MAX_BYTES, MAX_PIXELS, MAX_SIDE
from serving.model.spec import (
    FORMAT_VERSION,
    KEY,
    ModelSpec,
    fingerprint,
    keep_outputs,
    output_names,
    read_model,
    read_spec,
    write_spec,
)
from tests.tiny_model import tiny_graph, tiny_spec, write_tiny_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.onnx")


def _with_text(path: Path, *texts: str) -> Path:
    model = onnx.load_model_from_string(path.read_bytes())
    del model.metadata_props[:]
    for text in texts:
        model.metadata_props.add(key=KEY, value=text)
    path.write_bytes(model.SerializeToString())
    return path


def test_spec_comes_back_as_it_was_written(tmp_path: Path) -> None:
    graph = tiny_graph()
    named: dict[str, Any] = {"backbone": "bn_inception", "pooling": "gem", "versions": {"torch": "2"}}
    named |= {"accuracy": {"map_at_r": 0.4, "recall_at": {"1": 0.8}}, "recipe": {"lr": 1e-3, "flip": True}}
    spec = tiny_spec(graph, split=SplitRule(by="folder", train=5), grid=(4, 2), seed=0, **named)
    write_spec(graph, spec)
    (tmp_path / "m.onnx").write_bytes(graph.SerializeToString())
    data, again = read_model(tmp_path / "m.onnx")
    assert again == spec == read_spec(tmp_path / "m.onnx")
    assert data == graph.SerializeToString()
    onnx.checker.check_model(onnx.load_model_from_string(data))


def test_file_from_before_poolings_had_names_averages(path: Path) -> None:
    values = read_spec(path).model_dump(mode="json", exclude={"pooling", "backbone"})
    spec = read_spec(_with_text(path, json.dumps(values)))
    assert (spec.pooling, spec.backbone) == ("gap", "")


def test_write_replaces_all_other_metadata_and_refuses_the_spec_of_another_graph() -> None:
    graph = tiny_graph()
    graph.metadata_props.add(key="author", value="/home/someone")
    graph.metadata_props.add(key=KEY, value="old")
    write_spec(graph, tiny_spec(graph))
    assert [entry.key for entry in graph.metadata_props] == [KEY]
    with pytest.raises(BadArtifact, match="ModelSpec of tiny is for the fingerprint"):
        write_spec(tiny_graph(), tiny_spec(tiny_graph(size=9)))


def test_fingerprint_leaves_out_what_computes_nothing() -> None:
    one, other = tiny_graph(), tiny_graph()
    other.producer_name, other.producer_version, other.doc_string = "pytorch", "9", "made on a Monday"
    other.graph.doc_string = other.graph.node[0].doc_string = other.graph.input[0].doc_string = "x"
    other.graph.node[1].metadata_props.add(key="stack_trace", value="/home/someone/model.py")
    other.graph.initializer[0].doc_string = "x"
    other.metadata_props.add(key=KEY, value="{}")
    assert fingerprint(one) == fingerprint(other)
    assert other.graph.node[0].doc_string == "x"  # the model itself is left as it is


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.graph.initializer[0].float_data.__setitem__(0, 1.5),
        lambda model: model.graph.node[3].attribute[0].__setattr__("i", 0),
        lambda model: model.graph.node.pop(),
        lambda model: model.graph.node[0].input.__setitem__(0, "other"),
        lambda model: model.opset_import[0].__setattr__("version", 17),
    ],
)
def test_fingerprint_sees_what_computes(change: Any) -> None:
    model = tiny_graph()
    change(model)
    assert fingerprint(model) != fingerprint(tiny_graph())


def test_fingerprint_reaches_into_subgraphs() -> None:
    def branching(value: float, doc: str) -> onnx.ModelProto:
        constant = onnx.helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [value])
        node = onnx.helper.make_node("Constant", [], ["y"], value=constant, doc_string=doc)
        inner = onnx.helper.make_graph([node], "inner", [], [])
        outer = onnx.helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        return onnx.helper.make_model(onnx.helper.make_graph([outer], "outer", [], []))

    assert fingerprint(branching(1, "a")) == fingerprint(branching(1, "b")) != fingerprint(branching(2, "a"))


def test_kept_outputs_bring_all_they_need_and_nothing_else() -> None:
    data = tiny_graph().SerializeToString()
    assert output_names(data) == ("embeddings", "histograms")
    kept = onnx.load_model_from_string(keep_outputs(data, {"embeddings"}))
    assert [node.op_type for node in kept.graph.node] == ["Cast", "Add", "ReduceMean", "LpNormalization"]
    assert [tensor.name for tensor in kept.graph.initializer] == ["bias", "axes"]
    assert [port.name for port in kept.graph.output] == ["embeddings"]
    onnx.checker.check_model(kept)
    whole = onnx.load_model_from_string(keep_outputs(data, output_names(data)))
    assert fingerprint(whole) == fingerprint(tiny_graph())


def _refused(path: Path, message: str) -> None:
    with pytest.raises(BadArtifact, match=message):
        read_spec(path)


def test_what_is_not_there_or_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"m\.onnx is not there; give the \.onnx file"):
        read_spec(tmp_path / "m.onnx")
    _refused(tmp_path, "is no file; give the")
    os.mkfifo(tmp_path / "m.onnx")  # and it is not waited for
    _refused(tmp_path / "m.onnx", r"m\.onnx is no file; give the")


@pytest.mark.parametrize("data", [b"", b"a text", b"\x89PNG\r\n\x1a\n", b"\0" * 64])
def test_file_that_is_no_model(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    _refused(tmp_path / "m.onnx", "is not an ONNX file")


def test_no_spec_two_specs_and_a_newer_one(path: Path) -> None:
    spec = read_spec(path)
    newer = json.dumps(spec.model_dump(mode="json") | {"format_version": FORMAT_VERSION + 1, "novelty": 1})
    _refused(_with_text(path), "ONNX file with 0 crossbatch ModelSpecs, and a model has one; make it")
    _refused(_with_text(path, *[spec.model_dump_json()] * 2), "with 2 crossbatch ModelSpecs")
    _refused(_with_text(path, newer), "format version 2, and this crossbatch reads up to 1; upgrade")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 0}, "damaged: image_size: "),
        ({"novelty": 1}, "damaged: novelty: Extra inputs"),
        ({"resampling": "cubic"}, "damaged: resampling: .*'cubic' is not one of bilinear, bicubic"),
        ({"fingerprint": "abc"}, "damaged: fingerprint: "),
        ({"format_version": "new"}, "damaged: format_version: "),
        ({"split": {"by": "moon", "train": 0.5}}, r"damaged: split\.by: "),
        ("{", r"ModelSpec of .* is damaged: it is not JSON"),
        *((text, "is damaged: the whole: ") for text in ("[]", "3", "null")),
        ("{}", "is damaged: name: Field required"),
    ],
)
def test_spec_that_is_damaged(path: Path, changes: dict[str, Any] | str, message: str) -> None:
    spec = read_spec(path).model_dump(mode="json")
    _refused(_with_text(path, changes if isinstance(changes, str) else json.dumps(spec | changes)), message)


def test_flipped_byte_in_the_weights(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<3f", 1, 2, 3))] ^= 1
    path.write_bytes(data)
    _refused(path, r"is damaged: the fingerprint of its graph .* export or copy it again")


def test_weights_in_another_file_or_beyond_one_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tiny_graph()
    tensor = graph.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    _refused(write_tiny_model(path, graph), "keeps weights in another file")
    monkeypatch.setattr(module, "MAX_MODEL_BYTES", 100)
    _refused(path, r"has \d+ bytes; a model has at most 100")


_MODEL = tiny_graph()
write_spec(_MODEL, tiny_spec(_MODEL))


@settings(deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.floats(0, 1))
def test_damage_is_refused_or_harmless(tmp_path_factory: Any, place: float, flip: int, keep: float) -> None:
    """A damaged file either is refused, or still computes the same (the damage is in what only describes)."""
    whole = _MODEL.SerializeToString()
    data = bytearray(whole[: max(1, int(len(whole) * keep * 2))])
    data[int(place * len(data))] ^= flip
    file = tmp_path_factory.getbasetemp() / "damaged.onnx"
    file.write_bytes(data)
    try:
        spec = read_spec(file)
    except BadArtifact:
        return
    assert spec.fingerprint == fingerprint(_MODEL) == fingerprint(onnx.load_model_from_string(bytes(data)))


PAGE = (Path(__file__).parents[2] / "docs/artifact.md").read_text(encoding="utf-8")


def test_every_field_has_its_line_in_the_docs() -> None:
    documented = re.findall(
        r"^\| `(\w+)` \|", PAGE.partition("| field |")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert documented == list(ModelSpec.model_fields)


def test_bounds_in_the_docs_are_those_of_the_code() -> None:
    assert f"at most {MAX_BYTES >> 20} MiB" in PAGE
    assert f"at most {MAX_PIXELS:,} pixels" in PAGE
    assert f"and {MAX_SIDE:,} on a side" in PAGE
    assert f"{', '.join(FORMATS[:6])} or {FORMATS[6]}" in PAGE
