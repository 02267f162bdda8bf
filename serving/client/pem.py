"""What a client is given in PEM, read and parsed before gRPC has it, which says little of what is wrong."""

import ssl
from pathlib import Path
from typing import TypeAlias

from serving.errors import InvalidArgument

__all__ = ["Pem", "authorities", "pair"]

Pem: TypeAlias = bytes | str | Path
"""Certificates or a private key in PEM: the bytes, or where they lie."""


def authorities(given: Pem | None) -> bytes | None:
    """Read the certificates of authorities.

    Raises:
        InvalidArgument: if they cannot be read, or are none.
    """
    return None if given is None else _certificates(given, "ca")


def pair(certificate: Pem | None, private_key: Pem | None) -> tuple[bytes | None, bytes | None]:
    """Read a certificate and its private key.

    Raises:
        InvalidArgument: if one is missing, cannot be read, or they do not belong together.
    """
    if certificate is None and private_key is None:
        return None, None
    if certificate is None or private_key is None:
        raise InvalidArgument("certificate=... and private_key=... belong together; give both, or neither.")
    chain, key = _certificates(certificate, "certificate"), _bytes(private_key, "private_key")
    if b"PRIVATE KEY-----" not in key:
        raise InvalidArgument(f"There is no private key in {_named(private_key, 'private_key')}.")
    if not isinstance(certificate, bytes) and not isinstance(private_key, bytes):
        _check_pair(certificate, private_key)  # OpenSSL reads files alone, and a key is written to none
    return chain, key


def _certificates(given: Pem, what: str) -> bytes:
    data = _bytes(given, what)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("latin-1"))
    except (ssl.SSLError, ValueError) as error:
        held = "a private key and no certificate" if b"PRIVATE KEY-----" in data else "no certificate in PEM"
        raise InvalidArgument(
            f"There is {held} in {_named(given, what)}; that begins with -----BEGIN CERTIFICATE-----."
        ) from error
    return data


def _check_pair(certificate: str | Path, private_key: str | Path) -> None:
    def no_password() -> str:
        raise ValueError

    both = f"{_named(certificate, 'certificate')} and {_named(private_key, 'private_key')}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, private_key, no_password)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            f"{both} are no certificate and its key; give two that belong together."
        ) from error
    except ValueError as error:
        raise InvalidArgument(
            f"The key in {_named(private_key, 'private_key')} is encrypted; give one that is not."
        ) from error


def _named(given: Pem, what: str) -> str:
    return f"the bytes of {what}=..." if isinstance(given, bytes) else f"the file {what}={str(given)!r}"


def _bytes(given: Pem, what: str) -> bytes:
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str | Path):
        raise InvalidArgument(f"{what} must be bytes or a path; found {type(given).__name__}.")
    try:
        return Path(given).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        name = _named(given, what)
        raise InvalidArgument(
            f"{name[:1].upper()}{name[1:]} cannot be read ({reason}); check its path."
        ) from error
