"""The one error tree: everything a caller can cause, and what he reads about it.

A message is one plain sentence: what was found, what was expected, what to do. `serving.rpc.status` holds
the table from these classes to gRPC status codes.
"""

import copy
from typing import Self

__all__ = [
    "AlreadyExists", "BadArtifact", "BadData", "BadImage", "BadSetting", "Cancelled", "Conflict",
    "CrossbatchError", "DeadlineExceeded", "Draining", "InvalidArgument", "Mismatch", "ModelMismatch",
    "NotFound", "Overloaded", "PermissionDenied", "ReadOnly", "Unauthenticated", "Unavailable", "Unsupported",
]  # fmt: skip


class CrossbatchError(Exception):
    """Base of every error that is not a bug of ours.

    What a client's call ended with tells the name of its gRPC status (`code`, such as "NOT_FOUND"), the
    reason that the server gave (`reason`, such as "MODEL_MISMATCH"; empty where it gave none) and the id
    under which the server's log has the call (`request_id`). All are empty on what was raised without one.

    `stored` is set on what ends a client's `upsert` or `update`: how many items, from the first on, are
    stored for certain.
    """

    code: str = ""
    reason: str = ""
    request_id: str = ""
    stored: int = 0

    def saying(self, message: str) -> Self:
        """Make the same error with another message; it keeps all else that it tells."""
        error = copy.copy(self)
        error.args = (message,)
        return error


class InvalidArgument(CrossbatchError):
    """A request, flag or recipe that cannot be carried out as given."""


class BadImage(InvalidArgument):
    """Bytes that do not hold an image within the limits."""


class BadData(InvalidArgument):
    """A data set that is missing, unreadable or too small for what was asked."""


class BadSetting(InvalidArgument):
    """A setting that is unknown or out of range."""


class NotFound(CrossbatchError):
    """A gallery, item, recipe or file that is not there."""


class AlreadyExists(CrossbatchError):
    """A name that is taken."""


class Conflict(CrossbatchError):
    """An item that is of another version than the caller expected; read it again, then decide.

    `key` is the item's; `expected` and `found` are versions, 0 for one that is not there.
    """

    def __init__(self, message: str, *, key: str = "", expected: int = 0, found: int = 0) -> None:
        super().__init__(message)
        self.key = key
        self.expected = expected
        self.found = found


class Mismatch(CrossbatchError):
    """Two things that do not fit each other; the message names both."""


class ModelMismatch(Mismatch):
    """A gallery, query or checkpoint of another model."""


class BadArtifact(Mismatch):
    """A model file or gallery that is damaged or of a newer format."""


class Unauthenticated(CrossbatchError):
    """A call that brings no API key, or one that is not known."""


class PermissionDenied(CrossbatchError):
    """An API key whose role does not allow the call."""


class ReadOnly(CrossbatchError):
    """Something that cannot be written; trying again does not cure it."""


class Unsupported(CrossbatchError):
    """Something that this server, or the place where a gallery lies, cannot do; another may."""


class Overloaded(CrossbatchError):
    """No room now; the caller may try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(CrossbatchError):
    """The server is stopping and takes no new work."""


class DeadlineExceeded(CrossbatchError):
    """The caller's time ran out before the work was done."""


class Cancelled(CrossbatchError):
    """The caller hung up before the work was done."""


class Unavailable(CrossbatchError):
    """A server that cannot be reached, or a port that is in use."""


def cause_of(error: BaseException) -> str:
    """Return what an error of Python or a library says, as one line without a full stop."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0].rstrip(". ")
