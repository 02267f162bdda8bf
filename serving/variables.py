"""The environment variables of a command: those that are its settings, and those that seem meant to be."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from serving.errors import BadSetting

__all__ = ["given_variables", "variable_of"]

_PREFIX = "CROSSBATCH_"
# What Kubernetes sets where there is a service called crossbatch, or crossbatch-serve.
_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_LIKELY = 0.85  # how near a variable of no command is to a setting before it is thought to be meant as one


def variable_of(command: str, field: str) -> str:
    """Name the variable of a setting; with the command in it, as several commands have a port or a model."""
    return f"{_PREFIX}{command.upper()}_{field.upper()}"


def given_variables(
    command: str, fields: Collection[str], commands: Collection[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the settings that the environment gives.

    Args:
        command: The one that runs.
        fields: Of its settings, those that have a variable.
        commands: The names of all commands.
        environment: Of the process.

    Returns:
        The text of each setting that is given, by field; and a sentence for each variable that names no
        command and seems to be meant for this one.

    Raises:
        BadSetting: A variable of this command is none of its settings; names the nearest one.
    """
    prefix = variable_of(command, "")
    known = {variable_of(command, field): field for field in fields}
    short = {name.removeprefix(prefix): name for name in known}
    loose = short | {name.removeprefix(_PREFIX): name for name in known}
    found, doubts = {}, []
    for name, value in environment.items():
        if not name.startswith(_PREFIX) or _is_link(name, value):
            continue
        if name in known:
            found[known[name]] = value
        elif name.startswith(prefix):
            nearest = get_close_matches(name.removeprefix(prefix), short, 1, 0.5)
            hint = f"did you mean {short[nearest[0]]}? " if nearest else ""
            raise BadSetting(
                f"The environment variable {name} is no setting; {hint}"
                f"`crossbatch {command} --help` lists all."
            )
        elif not any(name.startswith(variable_of(other, "")) for other in commands):
            likely = get_close_matches(name.removeprefix(_PREFIX), loose, 1, _LIKELY)
            doubts += [
                f"the environment variable {name} is not read; {loose[each]} would be" for each in likely
            ]
    return found, doubts


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK.search(name)) or (
        name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    )
