"""Write docs/api.md anew from the proto files, the error tree and the limits: `python scripts/api.py`."""

import ast
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import google.rpc
import grpc_tools
from google.api import annotations_pb2
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from serving import errors  # noqa: E402
from serving.rpc import limits, status  # noqa: E402

Field = descriptor_pb2.FieldDescriptorProto

_HEAD = """\
# API reference

Made from `protos/*.proto`, `serving/errors.py` and `serving/rpc/limits.py` by `scripts/api.py`; a test
compares. How to run the server is in [serving.md](serving.md), what its calls mean in [calls.md](calls.md),
the Python client in [client.md](client.md).

Beside these services the server answers `grpc.health.v1.Health` (SERVING for the empty name and for each
service once it is ready, NOT_SERVING while it drains) and `grpc.reflection.v1alpha.ServerReflection`.
"""
_LIMITS = """
## Limits

| limit | value | what it bounds |
| --- | --- | --- |
"""
_ERRORS = """
## Errors

Every error is a `google.rpc.Status` whose message is one sentence: what was found, what was expected, what
to do. It has exactly one `google.rpc.ErrorInfo` with domain `crossbatch` and a reason from this table; the
Python client raises the class of `serving.errors` beside it. RESOURCE_EXHAUSTED comes with
`google.rpc.RetryInfo`; INVALID_ARGUMENT with `google.rpc.BadRequest` where fields of the request are to
blame, the first ten of them; CONFLICT tells `key`, `expected` and `found` in the metadata of its
`ErrorInfo`.

| class | code | reason | what it means |
| --- | --- | --- | --- |
"""
_TAIL = """
An INTERNAL error tells no internals: its message and its `ErrorInfo.metadata["incident"]` hold an id, under
which the server's log has the traceback. Errors that gRPC itself raises before a call reaches the server's
code have no `ErrorInfo`: a message past the limit is RESOURCE_EXHAUSTED, an unknown method UNIMPLEMENTED.
"""
_SCALARS = {
    getattr(Field, f"TYPE_{name.upper()}"): name
    for name in ("double", "float", "int64", "uint64", "int32", "uint32", "bool", "string", "bytes")
}


class _Contract:
    """Everything that the proto files say, with their comments by the place of what they explain."""

    def __init__(self, files: list[descriptor_pb2.FileDescriptorProto]) -> None:
        self.services: list[tuple[descriptor_pb2.ServiceDescriptorProto, str, list[str]]] = []
        self.messages: dict[str, tuple[descriptor_pb2.DescriptorProto, str, list[str]]] = {}
        for file in files:
            said = {
                tuple(place.path): " ".join(place.leading_comments.split())
                for place in file.source_code_info.location
            }
            for s, service in enumerate(file.service):
                calls = [said.get((6, s, 2, m), "") for m in range(len(service.method))]
                self.services.append((service, said.get((6, s), ""), calls))
            for n, message in enumerate(file.message_type):
                self._take(f".{file.package}.{message.name}", message, said, (4, n))

    def _take(
        self,
        name: str,
        message: descriptor_pb2.DescriptorProto,
        said: Mapping[tuple[int, ...], str],
        path: tuple[int, ...],
    ) -> None:
        fields = [said.get((*path, 2, f), "") for f in range(len(message.field))]
        self.messages[name] = (message, said.get(path, ""), fields)
        for i, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                self._take(f"{name}.{inner.name}", inner, said, (*path, 3, i))
            else:
                self.messages[f"{name}.{inner.name}"] = (inner, "", [])


def page() -> str:
    """Return the page's text."""
    contract = _Contract(_files())
    parts = [_HEAD]
    asked: set[str] = set()
    for service, said, calls in contract.services:
        parts.append(f"\n## {service.name}\n\n{said}\n")
        for method, told in zip(service.method, calls, strict=True):
            asked |= {method.input_type, method.output_type}
            http = method.options.Extensions[annotations_pb2.http]
            verb = http.WhichOneof("pattern")  # none of the Open Inference Protocol, which is not ours
            path = f"\nAs [JSON](http.md): `{verb.upper()} {getattr(http, verb)}`.\n" if verb else ""
            parts.append(f"\n### {method.name}\n\n{told}\n{path}")
            parts += _fields(contract, "Request", method.input_type)
            parts += _fields(
                contract, "Reply, streamed" if method.server_streaming else "Reply", method.output_type
            )
    parts.append("\n## Messages\n")
    for name, (message, said, _) in contract.messages.items():
        if name not in asked and not message.options.map_entry:
            parts.append(f"\n### {_short(name)}\n" + (f"\n{said}\n" if said else ""))
            parts += _fields(contract, "", name)
    parts.append(_LIMITS + "".join(f"| `{name}` | {value:,} | {said} |\n" for name, value, said in _limits()))
    parts.append(_ERRORS + "".join(_error_lines()) + _TAIL)
    parts.insert(1, _contents("".join(parts)))
    return "".join(parts)


def _contents(text: str) -> str:
    """List the sections of a page, each in a line with the calls or messages that it has."""
    lines: list[str] = []
    for heading in re.findall(r"^##+ .+$", text, re.MULTILINE):
        marks, _, title = heading.partition(" ")
        link = f"[{title}](#{title.lower().replace('.', '').replace(' ', '-')})"
        if len(marks) == 2:
            lines.append(f"- {link}")
        else:
            lines[-1] += f"{', ' if lines[-1].count('](') > 1 else ': '}{link}"
    return "\n" + "\n".join(lines) + "\n"


def _fields(contract: _Contract, title: str, name: str) -> Iterator[str]:
    message, said, told = contract.messages[name]
    if title:
        head = f"{title} `{message.name}`"
        yield f"\n{head}: {said}\n" if said else f"\n{head}{':' if message.field else ', empty.'}\n"
    if message.field:
        yield "\n| field | type | what it holds |\n| --- | --- | --- |\n"
    for field, text in zip(message.field, told, strict=True):
        yield f"| `{field.name}` | {_type(contract, message, field)} | {text.replace('|', chr(92) + '|')} |\n"


def _type(contract: _Contract, message: Any, field: Any) -> str:
    if field.type != Field.TYPE_MESSAGE:
        kind = _SCALARS[field.type]
    elif (known := contract.messages.get(field.type_name)) is None:
        kind = f"`{field.type_name[1:]}`"
    elif known[0].options.map_entry:
        key, value = known[0].field
        return f"map from {_type(contract, known[0], key)} to {_type(contract, known[0], value)}"
    else:
        title = _short(field.type_name)
        kind = f"[{title}](#{title.lower().replace('.', '')})"
    if field.label == Field.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    return (
        f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        if field.HasField("oneof_index")
        else kind
    )


def _short(name: str) -> str:
    """`.crossbatch.v1.Filter.Value` as `Filter.Value`: what stands after the package in lower case."""
    return ".".join(part for part in name.split(".") if part[:1].isupper())


def _limits() -> Iterator[tuple[str, int, str]]:
    """Each limit with the sentence that follows it in the code, there or where it is taken from."""
    tree = ast.parse(Path(limits.__file__).read_text(encoding="utf-8"))
    told = _sentences(tree)
    for line in tree.body:
        if isinstance(line, ast.ImportFrom) and line.module:
            origin = importlib.import_module(line.module).__file__
            there = _sentences(ast.parse(Path(str(origin)).read_text(encoding="utf-8")))
            told |= {each.asname or each.name: there[each.name] for each in line.names}
    for name in limits.__all__:
        yield name, getattr(limits, name), told[name]


def _sentences(tree: ast.Module) -> dict[str, str]:
    return {
        ast.unparse(line.targets[0]): str(after.value.value).rstrip(".")
        for line, after in itertools.pairwise(tree.body)
        if isinstance(line, ast.Assign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _error_lines() -> Iterator[str]:
    for kind, code in status.CODES.items():
        reason = "INTERNAL" if kind is errors.CrossbatchError else status.reason_of(kind("x"))
        told = str(kind.__doc__).splitlines()[0].rstrip(".")
        meant = "A fault of the server's own" if kind is errors.CrossbatchError else told
        yield f"| `{kind.__name__}` | {code.name} | {reason} | {meant} |\n"


def _files() -> list[descriptor_pb2.FileDescriptorProto]:
    folders = [
        Path("."),
        Path(grpc_tools.__file__).parent / "_proto",
        Path(next(iter(google.rpc.__path__))).parents[1],
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.binpb"
        includes = [f"-I{each}" for each in folders]
        line = [sys.executable, "-m", "grpc_tools.protoc", *includes, "--include_source_info"]
        subprocess.run([*line, f"--descriptor_set_out={image}", *names], check=True, cwd=ROOT)
        files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    return sorted(files, key=lambda file: (not file.service[0].name.startswith("Retrieval"), file.name))


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page(), encoding="utf-8")
