"""The server's certificate: checked before use, and read again when its files change."""

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc

from serving.errors import BadSetting
from serving.gallery.disk import stamp_of
from serving.settings import Settings

__all__ = ["renewed_context", "server_credentials", "trusting"]

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Read the certificate that a server was given; None for one that speaks plain text.

    gRPC asks at each new connection whether there is a newer one. Files that cannot be used then are logged,
    and leave the one that is in use; at first they are a BadSetting.
    """
    certificate, key, client_ca = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None or key is None:
        return None
    files = [certificate, key] if client_ca is None else [certificate, key, client_ca]
    stamps = [*map(stamp_of, files)]
    first = _configuration(*files)

    def newer() -> Any:  # a configuration, or None for no change
        nonlocal stamps
        now = [*map(stamp_of, files)]
        if now == stamps:
            return None
        stamps = now
        try:
            configuration = _configuration(*files)
        except BadSetting as error:  # half-written files too; they change again when they are whole
            logger.error("%s; the certificate read before stays in use", error)
            return None
        logger.info("read a new certificate of %s", certificate)
        return configuration

    return grpc.dynamic_ssl_server_credentials(first, newer, require_client_authentication=bool(client_ca))


def renewed_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make what a server in Python needs for TLS with the same files, read again in the same way."""
    stamps = [stamp_of(certificate), stamp_of(key)]
    newest = first = _read(certificate, key)[0]

    def look(connection: ssl.SSLObject, *_: object) -> None:  # at each new connection
        nonlocal newest, stamps
        now = [stamp_of(certificate), stamp_of(key)]
        if now != stamps:
            stamps = now
            try:
                newest = _read(certificate, key)[0]
            except BadSetting as error:
                logger.error("%s; the certificate read before stays in use", error)
        connection.context = newest

    first.sni_callback = look
    return first


def trusting(address: str, certificate: Path) -> tuple[grpc.ChannelCredentials, str]:
    """Make what a channel to our own server needs, which shows this certificate: credentials, a name in it.

    Raises an OSError where the server is not there or shows another one.
    """
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it whoever signed it
    context.check_hostname = False  # it is another name than that of the address
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_SECONDS) as plain,
        context.wrap_socket(plain) as secure,
    ):
        shown: Any = secure.getpeercert()
    names = shown.get("subjectAltName") or shown["subject"][-1]  # of pairs, (kind, name)
    return grpc.ssl_channel_credentials(certificate.read_bytes()), names[0][1].replace("*", "any")


def _configuration(
    certificate: Path, key: Path, client_ca: Path | None = None
) -> "grpc.ServerCertificateConfiguration":
    _, pair, roots = _read(certificate, key, client_ca)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


def _read(
    certificate: Path, key: Path, client_ca: Path | None = None
) -> tuple[ssl.SSLContext, tuple[bytes, bytes], bytes | None]:
    """Read the files, and try them with OpenSSL, which says more of them than gRPC does."""

    def no_password() -> str:  # OpenSSL would ask on the terminal
        raise ValueError("the key is encrypted")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        pair = (key.read_bytes(), certificate.read_bytes())
        roots = None if client_ca is None else client_ca.read_bytes()
        context.load_cert_chain(certificate, key, password=no_password)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadSetting(
                f"the key {key} is not that of the certificate {certificate}; give two that belong together"
            ) from error
        what = ", ".join(map(str, filter(None, (certificate, key, client_ca))))
        reason = (error.reason or "not readable").replace("_", " ").lower()
        raise BadSetting(f"{what} are no certificate and key ({reason}); give PEM files") from error
    except OSError as error:
        raise BadSetting(f"{error.filename} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BadSetting(f"the key {key} is encrypted; give --tls-key one that is not") from error
    return context, pair, roots
