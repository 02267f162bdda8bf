"""Certificates made on the spot: an authority, and what it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """PEM bytes of a certificate and its key."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Put both where a server of the tests looks for them."""
        paths = folder / "tls.crt", folder / "tls.key"
        for path, data in zip(paths, (self.certificate, self.key), strict=True):
            aside = path.with_suffix(".new")
            aside.write_bytes(data)
            aside.replace(path)
        return paths


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), name
        self.certificate = self._signed(name, self._key, 365, 0, ca=True)

    def sign(
        self, name: str = "server", *, days: int = 30, since: int = 1, address: str = "127.0.0.1"
    ) -> Pair:
        """Make a certificate for loopback that holds from `since` days ago for `days`, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._signed(name, key, days, since, address=address)
        return Pair(made, _private(key, serialization.NoEncryption()))

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        days: int,
        since: int,
        *,
        ca: bool = False,
        address: str = "127.0.0.1",
    ) -> bytes:
        begins = datetime.datetime.now(datetime.UTC) - since * _DAY
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(address))]
        made = (
            x509.CertificateBuilder(_name(self._name), _name(name), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + days * _DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)


def encrypted(pair: Pair) -> Pair:
    """The same pair, its key behind a password."""
    key = serialization.load_pem_private_key(pair.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Pair(pair.certificate, _private(key, serialization.BestAvailableEncryption(b"secret")))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private(key: ec.EllipticCurvePrivateKey, how: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
