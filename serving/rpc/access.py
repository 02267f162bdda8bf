"""Who calls, and what he may do."""

import hmac
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from serving.errors import BadSetting, CrossbatchError, PermissionDenied, Unauthenticated
from serving.rpc.keys import Key, hash_of, read_keys
from serving.rpc.roles import Role, role_of, short_name

__all__ = ["ANYBODY", "Access", "Identity", "Role", "identity"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at whether the file has changed
# That a call waits for a look: a key that was revoked while nobody called is not let in once more, and a disk
# that hangs stops no call.
LOOK_PATIENCE = 0.1

# The same for a key that is missing, unknown, revoked or no key at all: it helps nobody to guess.
_UNKNOWN = (
    "The call brings no API key that is valid here; send one as `authorization: Bearer KEY`. "
    "`crossbatch keys` makes them."
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls: the name of his API key, empty where none is needed."""

    name: str = ""
    role: Role = "write"


ANYBODY = Identity()

identity: ContextVar[Identity] = ContextVar("identity", default=ANYBODY)
"""Who made the call that the running task works for."""


class Access:
    """Lets calls in, or does not. Belongs to one event loop; takes no lock.

    The file is looked at in a thread, one at a time, which alone writes what is known of it.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the keys.

        Args:
            path: Their file, which is read again when it has changed; without one everybody may do all.

        Raises:
            NotFound: if there is no such file.
            BadArtifact: if it is damaged.
            BadSetting: if it has no key that may be used.
        """
        self._path = path
        self._known: list[tuple[bytes, Identity]] = []
        self._looked = time.monotonic()
        self._stamp: tuple[int, ...] | None = None
        self._complaint = ""
        self._looking: threading.Thread | None = None
        if path is None:
            return
        self._stamp = _stamp_of(path)
        self._known = _known(read_keys(path))
        if not self._known:
            raise BadSetting(
                f"the key file {path} has no key that may be used; "
                f"make one by `crossbatch keys add NAME --file {path}`"
            )

    def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """Find out who calls.

        Args:
            method: As gRPC writes it, with the slash before it: `/crossbatch.v1.RetrievalService/Search`.
            metadata: Of the call.

        Raises:
            Unauthenticated: if the call brings no key that is valid, and needs one.
        """
        if self._path is None or role_of(method) is None:
            return ANYBODY
        self._look_again(self._path)
        caller = self._find(_sent(metadata))
        if caller is None:
            raise Unauthenticated(_UNKNOWN)
        return caller

    def allow(self, method: str, caller: Identity) -> None:
        """Find out whether he may.

        Raises:
            PermissionDenied: if the key's role does not allow the call.
        """
        if role_of(method) == "write" and caller.role != "write":
            raise PermissionDenied(
                f"The key {caller.name} has the role {caller.role} and {short_name(method)} needs the role "
                "write; use a key that has it."
            )

    def _find(self, key: str) -> Identity | None:
        digest = hash_of(key)
        found = None
        for known, caller in self._known:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _look_again(self, path: Path) -> None:
        """Let a thread look at the file if it is time to, and wait for it a moment."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or (self._looking and self._looking.is_alive()):
            return
        self._looked = now
        looking = threading.Thread(target=self._look, args=(path,), name="keys", daemon=True)
        try:
            looking.start()
        except RuntimeError as error:  # there can be no more threads now
            logger.error("the key file %s is not looked at: %s", path, error)
            return
        self._looking = looking
        looking.join(LOOK_PATIENCE)

    def _look(self, path: Path) -> None:
        """Read the file again if it has changed; one that cannot be read changes nothing."""
        stamp = _stamp_of(path)
        if stamp is not None and stamp == self._stamp:
            return
        try:
            self._known = _known(read_keys(path))
        except CrossbatchError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("%s; the keys read before stay in force", error)
            self._stamp = None  # to be looked at again
            return
        self._stamp, self._complaint = stamp, ""
        logger.info("read %d keys of %s", len(self._known), path)


def _sent(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key that a call brings; empty, which no key is, if it brings none or several."""
    sent = set()
    for name, value in metadata:
        if isinstance(value, bytes):  # of a name that ends in -bin
            continue
        if name == "authorization":
            scheme, _, value = value.partition(" ")
            if scheme.lower() != "bearer":
                continue
        elif name != "x-api-key":
            continue
        sent.add(value.strip())
    return sent.pop() if len(sent) == 1 else ""


def _known(keys: Sequence[Key]) -> list[tuple[bytes, Identity]]:
    return [(bytes.fromhex(key.sha256), Identity(key.name, key.role)) for key in keys if key.revoked is None]


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is written or replaced; None when it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)
