"""Messages whose parts stay bytes, so that a large one is never unpacked, or built, as a whole.

Unpacked metadata takes many times the room of its bytes, and unpacking a whole message takes one long step
during which no other thread runs.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["loosened"]


def loosened(kind: Any) -> Any:
    """Make a message type of the same wire format, in which bytes stand where a field holds messages.

    Args:
        kind: A generated message class.

    Returns:
        A message class with the same fields.
    """
    described = descriptor_pb2.DescriptorProto()
    kind.DESCRIPTOR.CopyToProto(described)
    for field in described.field:
        if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
            field.ClearField("type_name")
            alone = field.label != descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
            if alone and not field.HasField("oneof_index"):  # it still can be told whether it was set
                field.proto3_optional, field.oneof_index = True, len(described.oneof_decl)
                described.oneof_decl.add(name=f"_{field.name}")
    file = descriptor_pb2.FileDescriptorProto(
        name=f"loose/{described.name}.proto", package="loose", syntax="proto3", message_type=[described]
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"loose.{described.name}"))
