"""The limits of one call, known to the server and to the Python client.

What an item may hold is in `serving.gallery.item`, a filter in `serving.gallery.search.filter`; the
largest image is `serving.model.preprocess.MAX_BYTES`.
"""

from serving.gallery.item import MAX_K
from serving.gallery.search.filter import MAX_CONDITIONS as MAX_FILTER_CONDITIONS
from serving.gallery.search.filter import MAX_LEVELS as MAX_FILTER_LEVELS

__all__ = [
    "DEFAULT_K", "DEFAULT_PAGE", "DEFAULT_PORT", "MAX_BYTES_IN_FLIGHT", "MAX_DELETED_KEYS", "MAX_EXCLUDED",
    "MAX_EXPLAINED", "MAX_FIELDS", "MAX_FILTER_CONDITIONS", "MAX_FILTER_LEVELS", "MAX_HITS", "MAX_INPUTS",
    "MAX_K", "MAX_MESSAGE_BYTES", "MAX_PAGE", "MAX_PREFIX",
]  # fmt: skip

DEFAULT_PORT = 50051
"""Port that the server listens on."""
DEFAULT_K = 10
"""Neighbours of a query where the call does not say."""
DEFAULT_PAGE = 100
"""Galleries or items on a page where the call does not say."""

MAX_INPUTS = 256
"""Most images, queries or items in one call."""
MAX_HITS = 65_536
"""Most neighbours in one reply: queries times k."""
MAX_EXCLUDED = 1_000
"""Most keys that one search leaves out."""
MAX_EXPLAINED = 32
"""Most images in one Explain."""
MAX_DELETED_KEYS = 1_000
"""Most keys in one DeleteItems."""
MAX_PAGE = 1_000
"""Most galleries or items on one page."""
MAX_FIELDS = 1_000
"""Most fields that ListFields tells of."""
MAX_PREFIX = 1_024
"""Most bytes of UTF-8 that values can be asked to begin with."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Most bytes of one request or reply; set on both ends, as gRPC's own 4 MiB refuse photographs."""
MAX_BYTES_IN_FLIGHT = 4 * MAX_MESSAGE_BYTES
"""Most bytes of all requests that a server works on at once."""
