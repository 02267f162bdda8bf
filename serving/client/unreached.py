"""Why a server could not be reached, in our own words: what gRPC says of it, and what to do."""

from serving.errors import Unavailable

__all__ = ["is_lasting", "unreached"]

_MISMATCH = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "WRONG_SSL_VERSION")
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "BAD_SIGNATURE", "certificate signature failure")
_MISNAMED = ("Hostname Verification", "Peer name")
_SECURITY = ("handshak", "SSL", "TLS", "certificate", "Custom verification")
_HUNG_UP = ("Socket closed", "onnection reset", "roken pipe", "EOF")


def is_lasting(details: str) -> bool:
    """Tell from what gRPC says whether every later try would end alike."""
    return any(word in details for word in (*_MISMATCH, *_UNTRUSTED, *_MISNAMED))


def unreached(address: str, details: str, *, encrypted: bool) -> Unavailable:
    """Tell what a call that reached no server ended with.

    Args:
        address: Of the server.
        details: What gRPC says.
        encrypted: Whether the client speaks TLS.
    """

    def says(words: tuple[str, ...]) -> bool:
        return any(word in details for word in words)

    there = f"The server at {address}"
    if says(_MISMATCH):
        fault = f"{there} seems to speak no TLS, and you do; leave out tls=True, ca=... and certificate=..."
    elif says(_UNTRUSTED):
        fault = (
            f"{there} shows a certificate that is not trusted; give the authority that signed it by ca=..., "
            "and see that it is valid today"
        )
    elif says(_MISNAMED):
        fault = (
            f"{there} shows a certificate for another host name; call it by a name that its certificate has"
        )
    elif "failed to connect" in details and says(_HUNG_UP):
        fault = f"{there} hangs up before it answers; " + (
            "if it wants a client certificate, give one that it trusts by certificate=... and private_key=..."
            if encrypted
            else "if it speaks TLS, give its authority by ca=..., or tls=True for the system's"
        )
    elif encrypted and says(_SECURITY):
        fault = (
            f"{there} and you do not agree on TLS; look at ca=..., the host name, certificate=... and "
            "private_key=..."
        )
    else:
        return Unavailable(
            f"No server answers at {address} ({details}); "
            "start one with `crossbatch serve`, or give its address."
        )
    return Unavailable(f"{fault} ({details}).")
