"""How the calls of a client are made: how patient they are, and what stands in their headers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Self, TypeAlias

from serving.errors import InvalidArgument

__all__ = ["REQUEST_ID", "Headers", "Options", "headers_of"]

REQUEST_ID = "x-request-id"
LONGEST_TIMEOUT = 86_400
# As HTTP/2 counts them, 32 more for each. Servers and proxies refuse headers of more than 8 KiB in all, the
# key among them.
MAX_METADATA_BYTES = 4_096

Headers: TypeAlias = tuple[tuple[str, str], ...]

_OTHERWISE = {
    "authorization": "give the key by api_key=...",
    REQUEST_ID: "give it by with_options(request_id=...)",
    **dict.fromkeys(("content-type", "te", "user-agent"), "gRPC sends its own"),
    **dict.fromkeys(("connection", "host"), "HTTP/2 has none"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What each call of a client has; keys and values of `metadata` may be secrets and are not shown."""

    timeout: float
    retries: int
    metadata: Mapping[str, str] = field(repr=False)
    request_id: str = ""

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            InvalidArgument: if one makes no sense.
        """
        numbers = isinstance(self.timeout, Real) and isinstance(self.retries, Integral)
        if not numbers or not 0 < self.timeout <= LONGEST_TIMEOUT or self.retries < 0:
            raise InvalidArgument(
                f"timeout={self.timeout!r}, retries={self.retries!r} cannot make a call; the timeout must be "
                f"above 0 and at most {LONGEST_TIMEOUT:,} seconds, and retries 0 or more."
            )
        _check_request_id(self.request_id)
        object.__setattr__(self, "metadata", _checked(self.metadata))

    def changed(
        self,
        *,
        timeout: float | None,
        retries: int | None,
        metadata: Mapping[str, str] | None,
        request_id: str | None,
    ) -> Self:
        """Change those that are not None; metadata is added to what there is.

        Raises:
            InvalidArgument: if one makes no sense.
        """
        return replace(
            self,
            timeout=self.timeout if timeout is None else timeout,
            retries=self.retries if retries is None else retries,
            metadata=self.metadata if metadata is None else {**self.metadata, **_checked(metadata)},
            request_id=self.request_id if request_id is None else request_id,
        )


def headers_of(options: Options, request_id: str, security: Headers) -> Headers:
    """Write the headers of a call."""
    return (*security, *options.metadata.items(), (REQUEST_ID, request_id))


def _checked(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Check metadata, which gRPC refuses without saying what is wrong with it; gives a copy."""
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a mapping of strings; found {type(metadata).__name__}.")
    for key, value in metadata.items():
        if not isinstance(key, str) or not re.fullmatch(r"[0-9a-z_.-]+", key):
            raise InvalidArgument(
                f"metadata cannot have the key {key!r:.80}; a key is of lower-case letters, digits, '-', '_' "
                "and '.'."
            )
        if key in _OTHERWISE or key.startswith("grpc-") or key.endswith("-bin"):
            remedy = _OTHERWISE.get(key, "grpc-... are gRPC's own, and ...-bin are no strings")
            raise InvalidArgument(f"metadata cannot have the key {key!r:.80}; {remedy}.")
        # The value is in no message: it may be a secret, and messages end in logs.
        if not isinstance(value, str) or not re.fullmatch(r"[ -~]*", value):
            raise InvalidArgument(f"The metadata {key!r} must be a string of printable ASCII characters.")
    size = sum(len(key) + len(value) + 32 for key, value in metadata.items())
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"The metadata has {size:,} bytes; at most {MAX_METADATA_BYTES:,} are sent with a call."
        )
    return MappingProxyType(dict(metadata))


def _check_request_id(request_id: str) -> None:
    if not isinstance(request_id, str) or not re.fullmatch(r"[!-~]{0,64}", request_id):
        raise InvalidArgument(
            f"request_id cannot be {request_id!r:.100}; it must be a string of at most 64 visible ASCII "
            "characters."
        )
