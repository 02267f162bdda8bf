"""The server's certificate, key and authorities: checked before use, and read again when they change."""

import logging
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from serving.errors import BadSetting
from serving.settings import Settings
from serving.whole import read_whole

__all__ = ["Certificates"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at whether the files have changed
_MAX_BYTES = 1 << 24  # of a file; the authorities of all the web take less than one MiB

_OUTDATED = {9: "is not valid yet", 10: "has expired"}  # by OpenSSL's X509_V_ERR_...


class Certificates:
    """Gives gRPC the certificates of three files; gRPC asks on its own threads, at each new connection."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read the files.

        Args:
            certificate: PEM file of the server's certificate and those that lead to its authority.
            key: PEM file of its private key, not encrypted.
            client_ca: PEM file of the authorities whose certificates clients must show; none need to without.

        Raises:
            BadSetting: if a file cannot be used; the sentence tells which and why.
        """
        self._paths = (certificate, key, client_ca)
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._data = self._read()
        self._complaint = ""

    @classmethod
    def of(cls, settings: Settings) -> "Certificates | None":
        """Read the files that a server was given; None for one that speaks plain text.

        Raises:
            BadSetting: if a file cannot be used.
        """
        if settings.tls_certificate is None or settings.tls_key is None:
            return None
        return cls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a secure port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._data),
            self._changed,
            require_client_authentication=self._paths[2] is not None,
        )

    def _changed(self) -> Any:
        """What new connections use from now on; None when that stays as it is. Never raises."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < LOOK_SECONDS:
                return None
            self._looked = now
            try:
                data = _bytes_of(*self._paths)
                if data == self._data:
                    return None
                self._data = self._read()
            except Exception as error:  # half-written files among others, which are whole at a later look
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    logger.error("%s; the certificate read before stays in use", error)
                return None
            self._complaint = ""
            logger.info("read a new certificate of %s", self._paths[0])
            return _configuration(self._data)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        """Read files that fit each other and do not change meanwhile.

        Raises:
            BadSetting: if they do not.
        """
        data = _bytes_of(*self._paths)
        _check(*self._paths)
        if _bytes_of(*self._paths) != data:
            raise BadSetting(f"the files beside {self._paths[0]} change while they are read; start again")
        return data


def _bytes_of(certificate: Path, key: Path, client_ca: Path | None) -> tuple[bytes, bytes, bytes | None]:
    return (
        _content("--tls-certificate", certificate),
        _content("--tls-key", key),
        None if client_ca is None else _content("--tls-client-ca", client_ca),
    )


def _content(flag: str, path: Path) -> bytes:
    try:
        return read_whole(path, _MAX_BYTES)
    except OSError as error:
        raise BadSetting(f"{flag} {path} cannot be read ({error.strerror or error})") from error


def _configuration(data: tuple[bytes, bytes, bytes | None]) -> "grpc.ServerCertificateConfiguration":
    certificate, key, client_ca = data
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)


def _check(certificate: Path, key: Path, client_ca: Path | None) -> None:
    """Try the files with OpenSSL, which says more of them than gRPC does.

    Raises:
        BadSetting: if they cannot be used.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadSetting(
                f"the key {key} is not that of the certificate {certificate}; give two that belong together"
            ) from error
        raise BadSetting(
            f"{certificate} and {key} are no certificate and key ({_reason(error)}); give PEM files"
        ) from error
    except ValueError as error:
        raise BadSetting(f"the key {key} is encrypted; give --tls-key one that is not") from error
    if client_ca is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise BadSetting(
                f"--tls-client-ca {client_ca} holds no certificate ({_reason(error)}); give a PEM file"
            ) from error
    _try(server, certificate)


def _try(server: ssl.SSLContext, certificate: Path) -> None:
    """Shake hands in memory with a client that trusts the certificate itself: does its time go on?"""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(4):  # the flights of a handshake
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                what = _OUTDATED.get(error.verify_code, f"cannot be used ({error.verify_message})")
                raise BadSetting(f"the certificate {certificate} {what}; give a current one") from error
            except ssl.SSLError as error:
                raise BadSetting(
                    f"the certificate {certificate} cannot be used ({_reason(error)}); give another one"
                ) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")  # OpenSSL would ask on the terminal


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not readable").replace("_", " ").lower()
