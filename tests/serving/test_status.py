"""The table between errors and status codes: total, one ErrorInfo each, and the way back."""

import base64
import logging
import string
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from serving import errors
from serving.errors import CrossbatchError
from serving.gallery.item import BadVector
from serving.rpc.status import CODES, Refusal, Violation, from_status, reason_of, to_status, violations_of

PLAIN = string.punctuation.replace("%", "") + " "
"""What gRPC leaves as it is in a message, beside letters and digits."""


ALL = [getattr(errors, name) for name in errors.__all__]


def details(status: status_pb2.Status, kind: Any) -> list[Any]:
    messages = [(packed, kind()) for packed in status.details]
    return [message for packed, message in messages if packed.Unpack(message)]


def told(code: int, **info: Any) -> status_pb2.Status:
    """A status of another hand."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(domain="crossbatch", **info))
    return status_pb2.Status(code=code, message="m", details=[packed])


def test_the_table_holds_every_error_and_nothing_else() -> None:
    assert set(CODES) == set(ALL)
    status = to_status(BadVector("a class that is not in it takes the code of its parent"))
    assert type(from_status(status)) is errors.InvalidArgument


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_error_has_one_error_info_and_comes_back_as_itself(kind: type[CrossbatchError]) -> None:
    status = to_status(kind("Found this; expected that."))
    (info,) = details(status, error_details_pb2.ErrorInfo)
    assert info.domain == "crossbatch"
    assert info.reason == reason_of(kind("x"))
    assert info.reason.isupper()
    assert len(info.reason) <= 63
    assert status.code == CODES[kind].value[0]
    back = from_status(status)
    assert type(back) is kind
    assert str(back) == "Found this; expected that."


def test_a_conflict_tells_the_item_and_both_versions() -> None:
    status = to_status(errors.Conflict("changed", key="shoes/1 ä", expected=2**60 + 1, found=0))
    (info,) = details(status, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"key": "shoes/1 ä", "expected": str(2**60 + 1), "found": "0"}
    strange: list[dict[str, str]] = [{}, {"expected": "x", "found": "-1"}, {"found": "²"}]
    others = [(told(10, reason="CONFLICT", metadata=each), ("", 0, 0)) for each in strange]
    for sent, expected in [(status, ("shoes/1 ä", 2**60 + 1, 0)), *others]:
        back = from_status(sent)
        assert isinstance(back, errors.Conflict)
        assert (back.key, back.expected, back.found) == expected


def test_an_overload_tells_when_to_return() -> None:
    status = to_status(errors.Overloaded("full", retry_after=0.25))
    (retry,) = details(status, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250
    back = from_status(status)
    assert isinstance(back, errors.Overloaded)
    assert back.retry_after == 0.25


def test_a_bug_shows_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status = to_status(ZeroDivisionError("secret /etc/passwd"))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(status)
    assert "ZeroDivision" not in str(status)
    (info,) = details(status, error_details_pb2.ErrorInfo)
    (record,) = caplog.records
    assert record.incident == info.metadata["incident"]  # type: ignore[attr-defined]
    assert record.incident in status.message  # type: ignore[attr-defined]
    assert record.exc_info
    assert type(from_status(status)) is CrossbatchError


def test_a_refusal_names_its_fields_and_comes_back() -> None:
    bad, missing = errors.BadImage("not an image"), errors.NotFound("no such key")
    status = to_status(Refusal([Violation("items[3].image", bad), Violation("items[4].key", missing)]))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == "items[3].image: not an image"
    assert len(details(status, error_details_pb2.ErrorInfo)) == 1
    back = violations_of(status)
    assert [(each.field, type(each.error), str(each.error)) for each in back] == [
        ("items[3].image", errors.BadImage, "not an image"),
        ("items[4].key", errors.NotFound, "no such key"),
    ]


@pytest.mark.parametrize("letter", ["x", "\u9375", "\U0001f426", "%", "\n", "\udcff"])
def test_a_status_fits_into_the_headers_however_much_is_wrong(letter: str) -> None:
    many = [Violation(f"items[{i}].image", errors.BadImage(letter * 5_000)) for i in range(256)]
    key = "\u9375" * 341
    for error in (
        Refusal(many),
        Refusal([Violation(letter * 5_000, errors.NotFound("none"))]),
        errors.NotFound(letter * 5_000),
        errors.Conflict(letter * 5_000, key=key),
    ):
        status = to_status(error)
        written = base64.b64encode(status.SerializeToString()), quote(status.message, safe=PLAIN)
        assert 1_000 < sum(map(len, written)) < 6_200
        if isinstance(error, Refusal):
            assert violations_of(status)
    assert to_status(errors.NotFound(key * 5)).message == "\u9375" * 332 + "..."  # ends with a whole letter


def test_a_status_of_another_hand_has_the_widest_error_of_its_code() -> None:
    known = {
        "INVALID_ARGUMENT": errors.InvalidArgument,
        "FAILED_PRECONDITION": errors.Mismatch,
        "RESOURCE_EXHAUSTED": errors.Overloaded,
        "UNAVAILABLE": errors.Unavailable,
        "CANCELLED": errors.Unavailable,  # by a proxy: the caller himself would not read it
        "UNIMPLEMENTED": errors.Unsupported,
    }
    for code in grpc.StatusCode:
        error = from_status(status_pb2.Status(code=code.value[0], message="m"))
        assert isinstance(error, known.get(code.name, CrossbatchError))
        assert type(error) is known.get(code.name, type(error))


@pytest.mark.parametrize("reason", ["", "NO_SUCH_REASON", "T", "ANY", "__ALL__", "CROSSBATCH_ERROR\0"])
def test_a_strange_reason_falls_back_to_the_code(reason: str) -> None:
    assert type(from_status(told(5, reason=reason))) is errors.NotFound
