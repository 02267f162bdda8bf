"""HTTP/2 by hand, to send what no gRPC library sends."""

import select
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field as HPACK writes it without a table; the value has fewer than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def begin(stream: int, path: str, *more: tuple[str, str], flags: int = END_HEADERS) -> bytes:
    """The HEADERS of a gRPC call."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"), *more,
    ]  # fmt: skip
    return frame(HEADERS, flags, stream, b"".join(literal(*each) for each in fields))


def message(data: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack(">BI", 0, len(data)) + data


class Raw:
    """A connection that has greeted the server and reads only when told to."""

    def __init__(self, address: str, settings: bytes = b"", source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 5, (source, 0) if source else None)
        self._rest = b""
        self.send(PREFACE, frame(SETTINGS, 0, 0, settings))

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def frames(self, longest: float = 5.0) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of what comes, until the server hangs up or that time is over."""
        deadline = time.monotonic() + longest
        while (left := deadline - time.monotonic()) > 0:
            while len(self._rest) >= 9 and len(self._rest) >= 9 + (size := int.from_bytes(self._rest[:3])):
                kind, flags, stream = struct.unpack(">BBI", self._rest[3:9])
                payload, self._rest = self._rest[9 : 9 + size], self._rest[9 + size :]
                yield kind, flags, stream, payload
            if not select.select([self.socket], [], [], left)[0]:
                return
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return
            if not data:
                return
            self._rest += data

    def ended(self, streams: int, longest: float = 5.0) -> dict[int, bytes]:
        """Wait until that many streams have been ended; tells the last headers of each."""
        found: dict[int, bytes] = {}
        for kind, flags, stream, payload in self.frames(longest):
            if kind == HEADERS and flags & END_STREAM:
                found[stream] = payload
                if len(found) == streams:
                    break
        return found

    def __enter__(self) -> "Raw":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
