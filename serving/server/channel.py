"""What gRPC is told of connections: what they may carry, how long they last, when they are given up."""

from serving.rpc.limits import MAX_MESSAGE_BYTES
from serving.settings import Settings

__all__ = ["channel_options"]

HANDSHAKE_SECONDS = 20
"""Within which whoever connects must speak HTTP/2 (and TLS where it is on); gRPC's own limit is 120."""
KEEPALIVE_SECONDS, KEEPALIVE_PATIENCE = 60, 20
"""After that long without a sign of the client it is asked for one, and given up if none comes."""
SHORTEST_PING = 10
"""Clients may ask as often; gRPC's own default hangs up on those who do so more than once in five minutes."""
SPREAD_SECONDS, SPREAD_GRACE = 60, 3_600
"""With several workers a connection is ended gently after about that time, and what runs on it may go on."""
MAX_HEADER_BYTES = 16 * 1024
"""Most bytes of the metadata of a call."""
WINDOW_BYTES = 256 * 1024
"""Most bytes that are held of a message while it waits for its turn to come in, and that a connection has on
the way: at 50 ms to the client and back some 5 MB/s of short messages."""
MAX_STREAMS = 1_024
"""Most calls of one connection at once; a client that has more lets them wait on its side."""
MAX_CONNECTIONS = 16_384
"""Most connections of a process; an idle one takes some 15 KB."""


def channel_options(settings: Settings) -> list[tuple[str, int]]:
    """Write the options of a server."""
    options = [
        # On by default on Linux, where a second server would silently share the port (grpc#10755, #19773).
        ("grpc.so_reuseport", int(settings.workers > 1)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # The first is what clients are told; past it gRPC refuses some calls at random, past the second all.
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Else windows grow with the speed of a connection, and with them what is held of calls whose message
        # nobody has asked for yet. That of a message that comes in grows with what is missing of it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", 1_000 * HANDSHAKE_SECONDS),
        # Else a client that is gone without a word, or answers nothing, keeps what it holds.
        ("grpc.keepalive_time_ms", 1_000 * KEEPALIVE_SECONDS),
        ("grpc.keepalive_timeout_ms", 1_000 * KEEPALIVE_PATIENCE),
        ("grpc.http2.ping_timeout_ms", 1_000 * KEEPALIVE_PATIENCE),
        # Allows clients to keep an idle connection open; gRPC's own default hangs up on them.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000 * SHORTEST_PING),
    ]
    if settings.workers > 1:
        # A connection is one worker's for ever (grpc#22036): clients that stay would leave new workers idle.
        # gRPC varies the time by a tenth, lest all come back at once.
        options += [
            ("grpc.max_connection_age_ms", int(1_000 * SPREAD_SECONDS)),
            ("grpc.max_connection_age_grace_ms", 1_000 * SPREAD_GRACE),
        ]
    return options
