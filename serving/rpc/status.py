"""One table between our errors and gRPC's status codes, used by the server one way and by the client back."""

import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from serving import errors
from serving.errors import CrossbatchError

__all__ = [
    "CODES", "DOMAIN", "Refusal", "Violation", "code_of", "from_status", "reason_of", "refusal", "to_status",
    "violations_of",
]  # fmt: skip

logger = logging.getLogger(__name__)

DOMAIN = "crossbatch"

CODES: dict[type[CrossbatchError], grpc.StatusCode] = {
    errors.CrossbatchError: grpc.StatusCode.INTERNAL,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadImage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadData: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadSetting: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BadArtifact: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ReadOnly: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
}

# For a status without a reason of ours, which gRPC itself or a proxy made: the first class of each code.
_BY_CODE: dict[int, type[CrossbatchError]] = {code.value[0]: kind for kind, code in reversed(CODES.items())}
_BY_CODE[grpc.StatusCode.CANCELLED.value[0]] = errors.Unavailable
_CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}

# A status travels in two headers, and many clients refuse headers of more than 8 KiB in all.
_MOST_HEADER_BYTES = 6 * 1024
_MOST_MESSAGE_BYTES = 1_000
_MOST_FIELD_BYTES = 200  # of the name of a field, and of what is said of it
_MOST_VIOLATIONS = 10


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that was refused, such as `items[3].image`, and why."""

    field: str
    error: CrossbatchError


class Refusal(Exception):
    """A request refused for some of its fields; its status is the first one's and names them all."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(str(violations[0].error))
        self.violations = tuple(violations)


def refusal(field: str, message: str) -> Refusal:
    """Make the error for one field of a request."""
    return Refusal([Violation(field, errors.InvalidArgument(message))])


def code_of(error: CrossbatchError) -> grpc.StatusCode:
    """Look up an error's code, by the nearest class that the table holds."""
    return CODES[_listed(error)]


def reason_of(error: Exception) -> str:
    """Name an error's class as google.rpc.ErrorInfo wants it, such as `BAD_IMAGE`; a bug is `INTERNAL`."""
    if isinstance(error, Refusal):
        error = error.violations[0].error
    if not isinstance(error, CrossbatchError):
        return "INTERNAL"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _listed(error).__name__).upper()


def to_status(error: Exception) -> status_pb2.Status:
    """Turn any exception into the status that the caller may see.

    It has exactly one ErrorInfo, which tells the item and versions of a conflict; RetryInfo for an overload,
    BadRequest for a `Refusal`. An exception that is not of our tree is a bug: it is logged under an id, and
    the caller sees only the id.
    """
    if isinstance(error, Refusal):
        first = error.violations[0]
        status = to_status(first.error)
        status.message = _shortened(f"{first.field}: {status.message}", _MOST_MESSAGE_BYTES)
        _add_violations(status, error.violations[:_MOST_VIOLATIONS])
        return status
    info = error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)
    if isinstance(error, CrossbatchError):
        code, message = code_of(error), str(error)
    else:
        code, incident = grpc.StatusCode.INTERNAL, uuid.uuid4().hex[:12]
        logger.error("a bug of ours, incident %s", incident, exc_info=error, extra={"incident": incident})
        message = f"The server failed by its own fault; its log tells more under incident {incident}."
        info.metadata["incident"] = incident
    if isinstance(error, errors.Conflict):
        info.metadata.update(key=error.key, expected=str(error.expected), found=str(error.found))
    status = status_pb2.Status(code=code.value[0], message=_shortened(message, _MOST_MESSAGE_BYTES))
    status.details.add().Pack(info)
    if isinstance(error, errors.Overloaded):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> CrossbatchError:
    """Turn a status back into the error that it was made from, with the name of its code and its reason.

    Its class is the one that the ErrorInfo names, or else the nearest one for the code.
    """
    info = _detail(status, error_details_pb2.ErrorInfo) or error_details_pb2.ErrorInfo()
    kind = _by_reason(info.reason if info.domain == DOMAIN else "")
    kind = kind or _BY_CODE.get(status.code, CrossbatchError)
    told: dict[str, Any] = {}
    if issubclass(kind, errors.Conflict):
        expected, found = (_number(info.metadata.get(name, "")) for name in ("expected", "found"))
        told = {"key": info.metadata.get("key", ""), "expected": expected, "found": found}
    elif issubclass(kind, errors.Overloaded):
        retry = _detail(status, error_details_pb2.RetryInfo)
        told = {} if retry is None else {"retry_after": retry.retry_delay.ToNanoseconds() / 1e9}
    error = kind(status.message, **told)
    error.code, error.reason = _CODE_NAMES.get(status.code, "UNKNOWN"), info.reason
    return error


def violations_of(status: status_pb2.Status) -> tuple[Violation, ...]:
    """Read the fields that a status complains about, in the server's order; none where it names none."""
    found = []
    bad = _detail(status, error_details_pb2.BadRequest)
    for each in () if bad is None else bad.field_violations:
        error = (_by_reason(each.reason) or errors.InvalidArgument)(each.description)
        error.code, error.reason = code_of(error).name, each.reason
        found.append(Violation(each.field, error))
    return tuple(found)


def _listed(error: CrossbatchError) -> type[CrossbatchError]:
    """The error's class, or the nearest one above it that is in the table."""
    return next(kind for kind in type(error).__mro__ if kind in CODES)


def _by_reason(reason: str) -> type[CrossbatchError] | None:
    name = "".join(word.capitalize() for word in reason.split("_"))
    return next((kind for kind in CODES if kind.__name__ == name), None)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _add_violations(status: status_pb2.Status, violations: Sequence[Violation]) -> None:
    """Add the violations to a status, as many as its headers have room for."""
    bad, packed = error_details_pb2.BadRequest(), status.details.add()
    for each in violations:
        before = packed.value
        bad.field_violations.add(
            field=_shortened(each.field, _MOST_FIELD_BYTES),
            description=_shortened(str(each.error), _MOST_FIELD_BYTES),
            reason=reason_of(each.error),
        )
        packed.Pack(bad)
        if _header_bytes(status) > _MOST_HEADER_BYTES:
            packed.value = before
            return


def _header_bytes(status: status_pb2.Status) -> int:
    """Bytes of both headers: the status in base64, and its message, which has three for each odd byte."""
    message: bytes = status.message.encode()
    odd = sum(not 0x20 <= byte <= 0x7E or byte == 0x25 for byte in message)
    return 4 * -(-len(status.SerializeToString()) // 3) + len(message) + 2 * odd


def _shortened(text: str, most: int) -> str:
    """A text of so many bytes at most, as UTF-8."""
    data = text.encode(errors="replace")  # a file's name may hold what is no Unicode
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."


def _detail(status: status_pb2.Status, kind: type[Any]) -> Any:
    """The first detail of a kind; None when there is none."""
    message = kind()
    return next((message for packed in status.details if packed.Unpack(message)), None)
