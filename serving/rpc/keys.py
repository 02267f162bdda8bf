"""The file of API keys: names, roles, and the hashes by which the keys are known again.

A key is 256 random bits, which nobody finds by trying, so a plain SHA-256 hides it: the slow hashes that
passwords need would only slow down each call.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import AlreadyExists, BadArtifact, InvalidArgument, NotFound, Overloaded
from serving.gallery.disk import disk_error, written_aside
from serving.whole import read_whole

__all__ = ["MAX_KEYS", "Key", "Role", "add_key", "hash_of", "read_keys", "revoke_key"]

Role: TypeAlias = Literal["read", "write"]

FORMAT = 1
PREFIX = "cb_"  # by which scanners for leaked secrets know it
MAX_KEYS = 1_000
_MAX_BYTES = 1 << 20
_PATIENCE, _PAUSE = 10.0, 0.01  # seconds that a change waits for another one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Key(BaseModel):
    """What is kept of a key. Times are UTC, `2026-01-31T12:00:00Z`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=f"^{_NAME.pattern}$")
    role: Role
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: str
    revoked: str | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    keys: list[Key] = Field(max_length=MAX_KEYS)


def hash_of(key: str) -> bytes:
    """Return the SHA-256 of a key, 32 bytes; whatever else was sent has one too."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def read_keys(path: Path) -> list[Key]:
    """Read a file of keys, those that were revoked too.

    Raises:
        NotFound: if there is no such file.
        BadArtifact: if it cannot be read, is damaged, or of a newer format.
    """
    try:
        data = read_whole(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no key file {path}; make one by `crossbatch keys add NAME --file {path}`"
        ) from error
    except OSError as error:
        raise BadArtifact(f"the key file {path} cannot be read ({error.strerror or error})") from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is no JSON") from error
    version = found.get("format") if isinstance(found, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise BadArtifact(
            f"the key file {path} is of format {version} and this crossbatch reads format {FORMAT}; "
            "install a newer one"
        )
    try:
        keys = _File.model_validate(found).keys
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
        raise _damaged(path, f"{place} is not as it was written") from error
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise _damaged(path, f"a {field} is in it twice")
    return keys


def add_key(path: Path, name: str, role: Role) -> str:
    """Make a key and keep its hash; the file is made with the first one.

    Returns:
        The key, which cannot be had again.

    Raises:
        InvalidArgument: if the name cannot be one, or the file is full.
        AlreadyExists: if the name is taken, also by a key that was revoked: logs tell keys by it.
        CrossbatchError: if the file is damaged or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} cannot be a key's name; take up to 64 letters, digits, dots, hyphens and underscores"
        )
    with _held(path):
        keys = read_keys(path) if path.exists() else []
        taken = next((key for key in keys if key.name == name), None)
        if taken is not None:
            what = f"revoked {taken.revoked}" if taken.revoked else "not revoked"
            raise AlreadyExists(f"there is a key {name} in {path} ({what}); choose another name")
        if len(keys) == MAX_KEYS:
            raise InvalidArgument(f"the key file {path} has {MAX_KEYS:,} keys, which is the most")
        text = PREFIX + secrets.token_urlsafe(32)
        _write(path, [*keys, Key(name=name, role=role, sha256=hash_of(text).hex(), created=_now())])
    return text


def revoke_key(path: Path, name: str) -> Key:
    """Take a key's rights away for good; one that was revoked before stays as it is.

    Returns:
        What is kept of it.

    Raises:
        NotFound: if there is no such key or file.
        CrossbatchError: if the file is damaged or cannot be written.
    """
    if not path.exists():
        read_keys(path)  # says what is wrong, and leaves no lock beside a file that is not there
    with _held(path):
        keys = read_keys(path)
        place = next((i for i, key in enumerate(keys) if key.name == name), None)
        if place is None:
            raise NotFound(f"there is no key {name!r} in {path}; `crossbatch keys list` shows all")
        if keys[place].revoked is None:
            keys[place] = keys[place].model_copy(update={"revoked": _now()})
            _write(path, keys)
        return keys[place]


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keep others from changing the file by a lock beside it, since the file itself is replaced."""
    lock = path.with_name(f"{path.name}.lock")
    deadline = time.monotonic() + _PATIENCE
    try:
        while (descriptor := _lock(lock)) is None:
            if time.monotonic() >= deadline:
                raise Overloaded(f"the key file {path} is being changed; try again")
            time.sleep(_PAUSE)
    except OSError as error:
        raise disk_error(error, f"the key file {path}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: whoever waits for this one finds that it is the lock no more
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Try to take a lock, a file that whoever has it removes at the end; gives its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    return None


def _write(path: Path, keys: Sequence[Key]) -> None:
    data: dict[str, Any] = _File(keys=list(keys)).model_dump()
    try:
        # A link stays one, to a file that is replaced.
        with written_aside(path.resolve()) as aside:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, 0o600)  # what a killed process left may have any mode
                json.dump(data, file, indent=1)
    except OSError as error:
        raise disk_error(error, f"the key file {path}") from error


def _damaged(path: Path, why: str) -> BadArtifact:
    return BadArtifact(f"the key file {path} is damaged: {why}; restore it from a backup")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
