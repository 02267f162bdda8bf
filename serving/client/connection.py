"""What both clients are made of: an address, how it is trusted, and how patient a call is."""

from collections.abc import Mapping
from typing import Any, Self

from serving.client.line import Line
from serving.client.options import Options
from serving.client.pem import Pem
from serving.client.security import security_of
from serving.rpc.limits import DEFAULT_PORT

__all__ = ["Connection"]


class Connection:
    """A line to one server, taken by the first call and kept for all that follow.

    Every call has `timeout` seconds, retries included. A call that is refused for want of room, or that finds
    no server, is made again while time is left, so that a server's restart, or a worker that dies, is ridden
    out; `retries` bounds how often. A call that may have been carried out already is made again only where
    that does no harm.

    Inputs beyond the limits of one call are sent in several, at most four at a time and together no more than
    one call's worth; each of them has the whole `timeout`.

    What one call is to have otherwise it gets by `with_options`. Each method's call has one request id,
    whatever number of calls to the server it takes: the one given, or one made for it. The server's log has
    each of them under it, and an error has it as `request_id`.

    It does not survive a fork: make a client in each process. A proxy that the environment names
    (`http_proxy`, `https_proxy`, `no_proxy`) is used, but never for this machine itself.
    """

    def __init__(
        self,
        address: str = f"127.0.0.1:{DEFAULT_PORT}",
        *,
        timeout: float = 10.0,
        retries: int = 1_000_000,
        api_key: str | None = None,
        tls: bool = False,
        ca: Pem | None = None,
        certificate: Pem | None = None,
        private_key: Pem | None = None,
        insecure: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the address; the first call connects.

        Args:
            address: HOST:PORT, or a target in gRPC's own spelling (`dns:///HOST:PORT`, `unix:/PATH`).
            timeout: Seconds that a call has.
            retries: Most tries after the first; by default more than any timeout has room for.
            api_key: Sent with each call as `authorization: Bearer KEY`.
            tls: Whether to use TLS with the system's authorities.
            ca: PEM, bytes or a path: TLS with these authorities instead.
            certificate: PEM of the client's own chain, for a server that wants one (mutual TLS).
            private_key: PEM of that certificate's key.
            insecure: Whether the key may be sent to another machine in plain text.
            metadata: Own headers of each call, for a proxy or the server's traces; keys in lower case.

        Raises:
            InvalidArgument: if an argument makes no sense, a file cannot be read, or the key would be sent to
                another machine in plain text.
        """
        self._options = Options(timeout, retries, {} if metadata is None else metadata)
        security = security_of(
            address,
            api_key=api_key,
            tls=tls,
            ca=ca,
            certificate=certificate,
            private_key=private_key,
            insecure=insecure,
        )
        self._line = Line(address, security)
        self._shares = False

    def with_options(
        self,
        *,
        timeout: float | None = None,
        retries: int | None = None,
        metadata: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Self:
        """Make a client with other options on the same connection, which costs next to nothing.

        Closing it leaves the connection open; closing the client that it came from closes it, too.

        Args:
            timeout: Seconds that a call has; as before when None.
            retries: Most tries after the first; as before when None.
            metadata: Headers that are added to those there are, or take their place.
            request_id: `x-request-id` of the calls, at most 64 visible ASCII characters; "" makes one for
                each again.

        Raises:
            InvalidArgument: if an option makes no sense.
        """
        client = object.__new__(type(self))
        client.__dict__.update(vars(self))  # those of a subclass as well
        client._shares = True
        client._options = self._options.changed(
            timeout=timeout, retries=retries, metadata=metadata, request_id=request_id
        )
        return client

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copied by hand it would hang up for the one that it was copied from.
        raise TypeError(
            f"A {type(self).__name__} holds a connection and cannot be pickled or copied; make one in each "
            "process, or take with_options(...)."
        )

    def _hang_up(self) -> None:
        if not self._shares:
            self._line.close()

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._line.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"
