"""JSON over HTTP and messages of gRPC, one into the other, by the annotations of the proto files."""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from google.api import annotations_pb2
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from protos import gallery_service_pb2, model_service_pb2, retrieval_service_pb2
from serving.errors import InvalidArgument

__all__ = ["ROUTES", "Route", "json_of"]

_FILES = (gallery_service_pb2, model_service_pb2, retrieval_service_pb2)
# What a variable takes of a raw path: a segment without the `:verb` of the pattern, or all that is left.
_VARIABLES = {"": "([^/:]+)", "*": "([^/:]+)", "**": "(.+)"}
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False, "": True}
_MOST_PARAMETERS = 1_000


@dataclass(frozen=True)
class Route:
    """A path of HTTP, and the call that it means."""

    method: MethodDescriptor
    verb: str  # GET, POST, ...
    template: str
    has_body: bool  # all fields but those of the path are in the body; else in the query

    def variables(self, path: str) -> dict[str, str] | None:
        """Read the fields in a raw path, still percent-encoded; None where the path is another one's."""
        names, pattern = [], ""
        for literal, name, inner in re.findall(r"([^{}]+)|\{([\w.]+)=?([^}]*)\}", self.template):
            pattern += _VARIABLES[inner] if name else re.escape(literal)
            names += [name] * bool(name)
        match = re.fullmatch(pattern, path)
        return None if match is None else dict(zip(names, match.groups(), strict=True))

    def request(self, variables: dict[str, str], query: bytes, body: bytes | bytearray) -> Message:
        """Make the request; what is none is an InvalidArgument that names the field."""
        kind = self.method.input_type
        message: Message = GetMessageClass(kind)()
        fields: dict[str, Any] = {}
        try:
            if self.has_body:
                if body and not re.match(rb"\s*\{", body):
                    raise ValueError("it is no object")
                json_format.Parse(bytes(body) or b"{}", message)
            texts = parse_qs(query.decode(), True, errors="strict", max_num_fields=_MOST_PARAMETERS)
            if self.has_body and texts:
                raise ValueError(f"no field can be given in the query, as {next(iter(texts))!r:.100} is")
            for path, values in texts.items():
                _put(kind, fields, path, values)
            for path, raw in variables.items():
                _put(kind, fields, path, [unquote(raw, errors="strict")])
            json_format.ParseDict(fields, message)
        except (ValueError, TypeError, RecursionError, json_format.Error) as error:
            reason = str(error).partition("\n")[0].rstrip(". ") or type(error).__name__
            raise InvalidArgument(f"This is not the JSON of a {kind.name}: {reason:.500}.") from error
        return message


def json_of(message: Message) -> str:
    """Write a message as Envoy does: the names of the proto files, what is at its default left out."""
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _put(kind: Descriptor, fields: dict[str, Any], path: str, texts: list[str]) -> None:
    """Put what a query or a path says of one field, such as `filter.exists`, where JSON has it."""
    *outer, last = path.split(".")
    for name in outer:
        field = kind.fields_by_name.get(name)
        inner = fields.setdefault(name, {})
        if field is None or field.message_type is None or field.is_repeated or not isinstance(inner, dict):
            raise ValueError(f"there is no field {path!r:.100}")
        kind, fields = field.message_type, inner
    field = kind.fields_by_name.get(last)
    if field is None or last in fields:
        raise ValueError(f"there is no field {path!r:.100}")
    if len(texts) > 1 and not field.is_repeated:
        raise ValueError(f"the field {path!r:.100} is given {len(texts)} times")
    values = [_BOOLEANS.get(text, text) for text in texts] if field.type == field.TYPE_BOOL else texts
    fields[last] = values if field.is_repeated else values[0]


def _routes(method: MethodDescriptor) -> list[Route]:
    rule = method.GetOptions().Extensions[annotations_pb2.http]
    return [
        Route(method, verb.upper(), getattr(each, verb), each.body == "*")
        for each in (rule, *rule.additional_bindings)
        if (verb := each.WhichOneof("pattern"))
    ]


ROUTES = [
    route
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for route in _routes(method)
]
"""A route for each binding of each annotated method."""
