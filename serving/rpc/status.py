"""One table between our errors and gRPC's status codes, used by the server one way and by the client back."""

import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from serving import errors
from serving.errors import CrossbatchError

__all__ = [
    "CODES",
    "DOMAIN",
    "Refusal",
    "Violation",
    "code_of",
    "from_status",
    "reason_of",
    "refusal",
    "to_status",
    "violations_of",
]

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
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
}

_BY_CODE: dict[int, type[CrossbatchError]] = {
    # For a status without a reason of ours, which gRPC itself or a proxy made: the first class of each code.
    **{code.value[0]: kind for kind, code in reversed(CODES.items())},
    grpc.StatusCode.CANCELLED.value[0]: errors.Unavailable,
}
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


def reason_of(error: CrossbatchError) -> str:
    """Name an error's class as google.rpc.ErrorInfo wants it: `BadImage` is `BAD_IMAGE`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _listed(error).__name__).upper()


def to_status(error: Exception) -> status_pb2.Status:
    """Turn any exception into the status that the caller may see.

    An exception that is not of our tree is a bug: it is logged under an id, and the caller sees only the id.

    Returns:
        A status with exactly one ErrorInfo, which tells the item and versions of a conflict; RetryInfo for an
        overload, BadRequest for a `Refusal`.
    """
    if isinstance(error, Refusal):
        first = error.violations[0]
        status = to_status(first.error)
        status.message = _shortened(f"{first.field}: {status.message}", _MOST_MESSAGE_BYTES)
        return _with_violations(status, error.violations[:_MOST_VIOLATIONS])
    if not isinstance(error, CrossbatchError):
        return _internal(error)
    message = _shortened(str(error), _MOST_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)
    if isinstance(error, errors.Conflict):
        info.metadata.update(key=error.key, expected=str(error.expected), found=str(error.found))
    status = status_pb2.Status(code=code_of(error).value[0], message=message, details=[_packed(info)])
    if isinstance(error, errors.Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def from_status(status: status_pb2.Status) -> CrossbatchError:
    """Turn a status back into the error that it was made from.

    Returns:
        An instance of the class that the ErrorInfo names, or else of the nearest one for the code; it has the
        name of the code, and the reason.
    """
    info = _detail(status, error_details_pb2.ErrorInfo) or error_details_pb2.ErrorInfo()
    kind = _by_reason(info.reason if info.domain == DOMAIN else "")
    kind = kind or _BY_CODE.get(status.code, CrossbatchError)
    retry = _detail(status, error_details_pb2.RetryInfo)
    error: CrossbatchError
    if issubclass(kind, errors.Overloaded) and retry is not None:
        error = kind(status.message, retry_after=retry.retry_delay.ToNanoseconds() / 1e9)
    elif issubclass(kind, errors.Conflict):
        told = info.metadata
        expected, found = _number(told.get("expected", "")), _number(told.get("found", ""))
        error = kind(status.message, key=told.get("key", ""), expected=expected, found=found)
    else:
        error = kind(status.message)
    error.code, error.reason = _CODE_NAMES.get(status.code, "UNKNOWN"), info.reason
    return error


def violations_of(status: status_pb2.Status) -> tuple[Violation, ...]:
    """Read the fields that a status complains about, in the server's order; none where it names none."""
    bad = _detail(status, error_details_pb2.BadRequest)
    return () if bad is None else tuple(Violation(each.field, _fault(each)) for each in bad.field_violations)


def _fault(violation: error_details_pb2.BadRequest.FieldViolation) -> CrossbatchError:
    error = (_by_reason(violation.reason) or errors.InvalidArgument)(violation.description)
    error.code, error.reason = code_of(error).name, violation.reason
    return error


def _listed(error: CrossbatchError) -> type[CrossbatchError]:
    """The error's class, or the nearest one above it that is in the table."""
    return next(kind for kind in type(error).__mro__ if kind in CODES)


def _by_reason(reason: str) -> type[CrossbatchError] | None:
    name = "".join(word.capitalize() for word in reason.split("_"))
    return next((kind for kind in CODES if kind.__name__ == name), None)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _internal(error: Exception) -> status_pb2.Status:
    incident = uuid.uuid4().hex[:12]
    logger.error("a bug of ours, incident %s", incident, exc_info=error, extra={"incident": incident})
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"incident": incident})
    return status_pb2.Status(
        code=grpc.StatusCode.INTERNAL.value[0],
        message=f"The server failed by its own fault; its log tells more under incident {incident}.",
        details=[_packed(info)],
    )


def _with_violations(status: status_pb2.Status, violations: Sequence[Violation]) -> status_pb2.Status:
    """Add the violations to a status, as many as its headers have room for."""
    bad = error_details_pb2.BadRequest()
    whole = status
    for each in violations:
        bad.field_violations.add(
            field=_shortened(each.field, _MOST_FIELD_BYTES),
            description=_shortened(str(each.error), _MOST_FIELD_BYTES),
            reason=reason_of(each.error),
        )
        longer = status_pb2.Status(
            code=status.code, message=status.message, details=[*status.details, _packed(bad)]
        )
        if _header_bytes(longer) > _MOST_HEADER_BYTES:
            break
        whole = longer
    return whole


def _header_bytes(status: status_pb2.Status) -> int:
    """Bytes of both headers: the status in base64, and its message, which has three for each odd byte."""
    message: bytes = status.message.encode()
    odd = sum(not 0x20 <= byte <= 0x7E or byte == 0x25 for byte in message)
    return 4 * -(-len(status.SerializeToString()) // 3) + len(message) + 2 * odd


def _shortened(text: str, most: int) -> str:
    """A text of so many bytes at most, as UTF-8."""
    data = text.encode(errors="replace")  # a file's name may hold what is no Unicode
    return data.decode() if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _detail(status: status_pb2.Status, kind: type[Any]) -> Any:
    """The first detail of a kind; None when there is none."""
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    return None
