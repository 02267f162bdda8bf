"""What both clients are made of: an address, how it is trusted, and how patient a call is."""

from serving.rpc.asking.line import Line
from serving.rpc.asking.pem import Pem
from serving.rpc.asking.security import security_of
from serving.rpc.limits import DEFAULT_PORT

__all__ = ["Connection"]


class Connection:
    """A line to one server, taken by the first call and kept for all that follow.

    Every call has `timeout` seconds, retries included. A call that is refused for want of room, or that finds
    no server, is made again up to `retries` times while time is left; as many as by default last more than 4
    seconds, so that a server's restart, or a worker that dies, is ridden out. A call that may have been
    carried out already is made again only where that does no harm.

    Inputs beyond the limits of one call are sent in several, at most four at a time and together no more than
    one call's worth; each of them has the whole `timeout`.

    It does not survive a fork: make a client in each process. A proxy that the environment names
    (`http_proxy`, `https_proxy`, `no_proxy`) is used, but never for this machine itself.
    """

    def __init__(
        self,
        address: str = f"127.0.0.1:{DEFAULT_PORT}",
        *,
        timeout: float = 10.0,
        retries: int = 12,
        api_key: str | None = None,
        tls: bool = False,
        ca: Pem | None = None,
        certificate: Pem | None = None,
        private_key: Pem | None = None,
        insecure: bool = False,
    ) -> None:
        """Keep the address; the first call connects.

        Args:
            address: HOST:PORT, or a target in gRPC's own spelling (`dns:///HOST:PORT`, `unix:/PATH`).
            timeout: Seconds that a call has.
            retries: Most tries after the first.
            api_key: Sent with each call as `authorization: Bearer KEY`.
            tls: Whether to use TLS with the system's authorities.
            ca: PEM, bytes or a path: TLS with these authorities instead.
            certificate: PEM of the client's own chain, for a server that wants one (mutual TLS).
            private_key: PEM of that certificate's key.
            insecure: Whether the key may be sent to another machine in plain text.

        Raises:
            InvalidArgument: if an argument makes no sense, a file cannot be read, or the key would be sent to
                another machine in plain text.
        """
        security = security_of(
            address,
            api_key=api_key,
            tls=tls,
            ca=ca,
            certificate=certificate,
            private_key=private_key,
            insecure=insecure,
        )
        self._line = Line(address, security, timeout=timeout, retries=retries)

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._line.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"
