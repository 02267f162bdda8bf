"""The command `crossbatch keys`: make, list and revoke the API keys of a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.errors import BadSetting
from serving.rpc.keys import Key, Role, add_key, read_keys, revoke_key

__all__ = ["Settings", "remark", "render", "run"]


class Settings(BaseModel):
    """Settings of `crossbatch keys`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["add", "list", "revoke"] = Field(
        description="add NAME: make a key and show it, this once; list: show the keys' names and roles; "
        "revoke NAME: refuse a key from now on, for good",
        json_schema_extra={"positional": True},
    )
    name: str | None = Field(
        default=None,
        description="the key's name, which logs tell its holder by",
        json_schema_extra={"positional": True},
    )
    role: Role = Field(
        default="read",
        description="what the key that is added may do: read (embed, search, look), or write as well",
    )
    file: Path = Field(
        default=Path("keys.json"), description="the file that holds the keys' hashes, for `serve --keys`"
    )


def run(settings: Settings) -> dict[str, Any]:
    """Do what the command says.

    Returns:
        The `action` and what came of it: for add the `key`; for list `keys`, one entry a key, without hashes.

    Raises:
        BadSetting: The name is missing, or one too many.
        CrossbatchError: There is no such file or key, the name is taken, or the file is damaged.
    """
    action, file = settings.action, settings.file
    if action == "list":
        if settings.name is not None:
            raise BadSetting("list needs no word after it: crossbatch keys list")
        return {"action": action, "file": str(file), "keys": [_shown(key) for key in read_keys(file)]}
    if settings.name is None:
        raise BadSetting(f"{action} needs one word after it, the key's name: crossbatch keys {action} NAME")
    name = settings.name
    if action == "revoke":
        return {"action": action, "file": str(file), **_shown(revoke_key(file, name))}
    key = add_key(file, name, settings.role)
    return {"action": action, "file": str(file), "name": name, "role": settings.role, "key": key}


def render(result: Mapping[str, Any]) -> str:
    """Say what was done, or show the keys as a table."""
    match result["action"]:
        case "add":
            return str(result["key"])
        case "revoke":
            return (
                f"the key {result['name']} is revoked since {result['revoked']}; "
                "running servers refuse it within 2 seconds"
            )
    rows = [("name", "role", "created", "revoked")]
    rows += [(key["name"], key["role"], key["created"], key["revoked"] or "-") for key in result["keys"]]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def remark(result: Mapping[str, Any]) -> str | None:
    """Say what the key is that was made, which is alone on standard output so that a file can take it."""
    if result["action"] != "add":
        return None
    return (
        f"This is the key of {result['name']}, of the role {result['role']}; it is shown this once. "
        f"Serve with --keys {result['file']}, and send it as `authorization: Bearer KEY`."
    )


def _shown(key: Key) -> dict[str, Any]:
    return key.model_dump(exclude={"sha256"})
