"""The limits of one call, known to the server and to the Python client."""

__all__ = [
    "DEFAULT_K",
    "DEFAULT_PORT",
    "MAX_DELETED_KEYS",
    "MAX_EXCLUDED",
    "MAX_HITS",
    "MAX_IMAGE_BYTES",
    "MAX_INPUTS",
    "MAX_K",
    "MAX_MESSAGE_BYTES",
]

DEFAULT_PORT = 50051
DEFAULT_K = 10

MAX_INPUTS = 256
"""Most images, queries or items in one call."""
MAX_K = 1_000
"""Most neighbours of one query."""
MAX_HITS = 65_536
"""Most neighbours in one reply: queries times k."""
MAX_EXCLUDED = 1_000
"""Most keys that one search leaves out."""
MAX_DELETED_KEYS = 1_000
"""Most keys in one DeleteItems."""

MAX_IMAGE_BYTES = 32 * 1024 * 1024
"""Most bytes of one encoded image."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Most bytes of one request or reply; set on both ends, as gRPC's own 4 MiB refuse photographs."""
