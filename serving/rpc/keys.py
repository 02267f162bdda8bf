"""The file of API keys: the keys in force, and the command `crossbatch keys` that makes and revokes them.

A key is 256 random bits, which nobody finds by trying, so a plain SHA-256 hides it: the slow hashes that
passwords need would only slow down each call.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import AlreadyExists, BadArtifact, BadSetting, CrossbatchError, InvalidArgument, NotFound
from serving.gallery.disk import disk_error, stamp_of, written_aside

__all__ = [
    "Key", "KeysInForce", "Role", "Settings", "add_key", "read_keys", "remark", "render", "revoke_key", "run",
]  # fmt: skip

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["read", "write"]

LOOK_SECONDS = 1.0  # between two looks at whether the file has changed
FORMAT = 1
PREFIX = "cb_"  # by which scanners for leaked secrets know it
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
    keys: list[Key]


class Settings(BaseModel):
    """Settings of `crossbatch keys`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    action: Literal["add", "list", "revoke"] = Field(json_schema_extra={"positional": True})
    """add NAME: make a key and show it, this once; list: show the keys' names and roles; revoke NAME: refuse
    a key from now on, for good"""
    name: str | None = Field(None, json_schema_extra={"positional": True})
    """the key's name, which logs tell its holder by"""
    role: Role = "read"
    """what the key that is added may do: read (embed, search, look), or write as well"""
    file: Path = Path("keys.json")
    """the file that holds the keys' hashes, for `serve --keys`"""


class KeysInForce:
    """The keys of a file that are not revoked; a thread reads it again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises as `read_keys` does, and BadSetting where it has no key that may be used."""
        self._path, self._stamp = path, stamp_of(path)
        self._keys = self._read()
        if not self._keys:
            raise BadSetting(
                f"the key file {path} has no key that may be used; "
                f"make one by `crossbatch keys add NAME --file {path}`"
            )
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="keys", daemon=True).start()

    def find(self, sent: str) -> Key | None:
        """Return what is kept of a key that was sent; None where it is unknown or revoked."""
        # By its hash, which an attacker cannot steer: how long a look-up takes tells nothing of other keys.
        return self._keys.get(_hash_of(sent))

    def close(self) -> None:
        """Look at the file no more."""
        self._closed.set()

    def _read(self) -> dict[str, Key]:
        return {key.sha256: key for key in read_keys(self._path) if key.revoked is None}

    def _watch(self) -> None:
        complaint = ""
        while not self._closed.wait(LOOK_SECONDS):
            now = stamp_of(self._path)
            if now == self._stamp and not complaint:
                continue
            self._stamp = now
            try:
                self._keys = self._read()
            except CrossbatchError as error:
                if str(error) != complaint:
                    logger.error("%s; the keys read before stay in force", error)
                complaint = str(error)
            else:
                complaint = ""
                logger.info("read %d keys of %s", len(self._keys), self._path)


def read_keys(path: Path) -> list[Key]:
    """Read a file of keys, those that were revoked too; raises NotFound, or BadArtifact if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
        version = found.get("format") if isinstance(found, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise BadArtifact(
                f"the key file {path} is of format {version} and this crossbatch reads format {FORMAT}; "
                "install a newer one"
            )
        keys = _File.model_validate(found).keys
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no key file {path}; make one by `crossbatch keys add NAME --file {path}`"
        ) from error
    except OSError as error:
        raise BadArtifact(f"the key file {path} cannot be read ({error.strerror or error})") from error
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
        raise _damaged(path, f"{place} is not as it was written") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is no JSON") from error
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise _damaged(path, f"a {field} is in it twice")
    return keys


def add_key(path: Path, name: str, role: Role) -> str:
    """Make a key, keep its hash, and return the key, which cannot be had again.

    A name that is taken, also by a key that was revoked, is AlreadyExists: logs tell keys by it.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} cannot be a key's name; take up to 64 letters, digits, dots, hyphens and underscores"
        )
    with _locked(path):
        keys = read_keys(path) if path.exists() else []
        taken = next((key for key in keys if key.name == name), None)
        if taken is not None:
            what = f"revoked {taken.revoked}" if taken.revoked else "not revoked"
            raise AlreadyExists(f"there is a key {name} in {path} ({what}); choose another name")
        text = PREFIX + secrets.token_urlsafe(32)
        _write(path, [*keys, Key(name=name, role=role, sha256=_hash_of(text), created=_now())])
    return text


def revoke_key(path: Path, name: str) -> Key:
    """Take a key's rights away for good; return what is kept of it."""
    read_keys(path)  # which leaves no lock beside a file that is not there
    with _locked(path):
        keys = read_keys(path)
        place = next((i for i, key in enumerate(keys) if key.name == name), None)
        if place is None:
            raise NotFound(f"there is no key {name!r} in {path}; `crossbatch keys list` shows all")
        if keys[place].revoked is None:
            keys[place] = keys[place].model_copy(update={"revoked": _now()})
            _write(path, keys)
        return keys[place]


def run(settings: Settings) -> dict[str, Any]:
    """Do what the command says; return the `action` and what came of it, without hashes."""
    action, file, name = settings.action, settings.file, settings.name
    done: dict[str, Any] = {"action": action, "file": str(file)}
    if action == "list":
        if name is not None:
            raise BadSetting("list needs no word after it: crossbatch keys list")
        return done | {"keys": [key.model_dump(exclude={"sha256"}) for key in read_keys(file)]}
    if name is None:
        raise BadSetting(f"{action} needs one word after it, the key's name: crossbatch keys {action} NAME")
    if action == "revoke":
        return done | revoke_key(file, name).model_dump(exclude={"sha256"})
    return done | {"name": name, "role": settings.role, "key": add_key(file, name, settings.role)}


def render(result: Mapping[str, Any]) -> str:
    """Say what was done, or show the keys as a table."""
    if result["action"] == "add":
        return str(result["key"])
    if result["action"] == "revoke":
        return (
            f"the key {result['name']} is revoked since {result['revoked']}; "
            "running servers refuse it within 2 seconds"
        )
    rows = [("name", "role", "created", "revoked")]
    rows += [(key["name"], key["role"], key["created"], key["revoked"] or "-") for key in result["keys"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def remark(result: Mapping[str, Any]) -> str | None:
    """Say what the key is that was made, which is alone on standard output so that a file can take it."""
    if result["action"] != "add":
        return None
    return (
        f"This is the key of {result['name']}, of the role {result['role']}; it is shown this once. "
        f"Serve with --keys {result['file']}, and send it as `authorization: Bearer KEY`."
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep others from changing the file by a lock beside it, since the file itself is replaced."""
    try:
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise disk_error(error, f"the key file {path}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, keys: Sequence[Key]) -> None:
    try:
        # A link stays one, to a file that is replaced.
        with written_aside(path.resolve()) as aside, open(aside, "x", opener=_for_its_owner) as file:
            json.dump(_File(keys=list(keys)).model_dump(), file, indent=1)
    except OSError as error:
        raise disk_error(error, f"the key file {path}") from error


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _damaged(path: Path, why: str) -> BadArtifact:
    return BadArtifact(f"the key file {path} is damaged: {why}; restore it from a backup")


def _hash_of(key: str) -> str:
    """Return the SHA-256 of a key; whatever else was sent has one too."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
