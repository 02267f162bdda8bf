"""crossbatch, the front door: one command line over training and serving.

Each command is a module with `Settings` (a pydantic model: default, flag, environment variable and help of
each setting), `run(settings)` (does it, returns JSON-able results) and `render(result)` (the same for a
person). There may be `complaint(result)`, the sentence to end with where a result shows a fault,
`remark(result)`, what a person is told beside it, and `stay(result)`, which goes on until Ctrl-C. Only
the module of the command asked for is imported.
"""

import argparse
import difflib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin

from serving.errors import BadSetting, CrossbatchError
from serving.progress import speaks

if TYPE_CHECKING:  # imported where it is needed: Ctrl-C in that time is then one word, and no traceback
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

__all__ = ["COMMANDS", "main", "parser_of", "spelled"]

# name -> (module, summary)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("training.train", "Train an embedding by a recipe"),
    "sweep": (
        "training.evaluation.sweep",
        "Train by a recipe over settings and seeds, and compare them in pairs",
    ),
    "mlrc": ("training.evaluation.mlrc", "Train by a recipe on each fold, and measure the ensembles"),
    "evaluate": ("training.evaluation.evaluate", "Measure R@k and MAP@R of a run or an exported model"),
    "report": ("training.report.report", "Show a run on one self-contained HTML page"),
    "export": ("training.export", "Write a run's best weights as one ONNX file"),
    "index": ("serving.indexing.command", "Embed a folder of images into a gallery"),
    "embed": ("serving.indexing.embed", "Embed a folder of images into one parquet file"),
    "gallery": ("serving.gallery.command", "Look after galleries: verify, snapshot, switch, drop and more"),
    "serve": ("serving.server.command", "Answer searches over gRPC"),
    "keys": ("serving.rpc.keys", "Make, list and revoke the API keys of a server"),
    "search": ("serving.search", "Ask a server for the nearest items of a photo"),
    "demo": ("training.demo", "All of the above on a small catalogue that it draws itself"),
}

# What to install when an engine is missing, by the half that a command belongs to.
_EXTRAS = {"training": "crossbatch[train,cpu]", "serving": "crossbatch[cpu]' or 'crossbatch[gpu]"}

# What stands for a value in the help, by its kind; the last part of the flag's name for all others.
_WORDS = {"Path": "PATH", "int": "N", "float": "NUMBER"}

_PREFIX = "CROSSBATCH_"
# What Kubernetes sets where there is a service called crossbatch, or crossbatch-serve.
_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_LIKELY = 0.85  # how near a variable of no command is to a setting before it is thought to be meant as one


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command by the words after `crossbatch`, those of the process by default.

    Gives the exit status: 0, 2 for an error that the caller can mend (one sentence), 130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    _mend_streams()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return _run(name, words[1:])
    except CrossbatchError as error:
        return _fail(name, str(error))
    except BrokenPipeError:  # the reader of a pipe (`| head`) has left; what it read was right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        what = error.strerror or type(error).__name__
        return _fail(name, f"{error.filename}: {what}" if error.filename else f"{what} ({error})")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    finally:  # no handler of ours stays: whoever calls this may close what is standard error now
        root.handlers[:] = handlers
        root.setLevel(level)


def parser_of(name: str, settings: "type[BaseModel]") -> argparse.ArgumentParser:
    """Build the parser of command `name` from its settings: flags, defaults, variables, help.

    Values are left as text for pydantic to read, and a flag that is not given leaves no trace.
    """
    parser = _Parser(
        prog=f"crossbatch {name}",
        description=f"{COMMANDS[name][1]}.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field, info in settings.model_fields.items():
        parser.add_argument(*_names(field, info), **_options(name, field, info))
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def spelled(field: str, info: "FieldInfo") -> str:
    """Return how a setting is given: `--max-batch`, or `MODEL.onnx` where it goes by place."""
    extra = info.json_schema_extra
    if isinstance(extra, dict) and extra.get("positional"):
        return str(extra.get("metavar", field.upper()))
    return _names(field, info)[-1]


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{message[:1].upper()}{message[1:]}. `{self.prog} --help` lists what it takes.")


def _run(name: str, words: list[str]) -> int:
    if name in ("-h", "--help"):
        _say(_overview())
        return 0
    if name == "--version":
        _say(f"crossbatch {importlib.metadata.version('crossbatch')}")
        return 0
    if name not in COMMANDS:
        hint = _nearest(name, COMMANDS)
        raise BadSetting(f"There is no command {name!r}; {hint}`crossbatch --help` lists all.")
    # Before gRPC is loaded, which writes lines of its own among ours: of each failed handshake, for example.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        command: Any = importlib.import_module(COMMANDS[name][0])
        settings, as_json = _settings(name, command.Settings, words)
        result = command.run(settings)
    except ModuleNotFoundError as error:  # a package of an extra, imported at once or when the command runs
        half, missing = COMMANDS[name][0].partition(".")[0], (error.name or "").partition(".")[0]
        if missing in ("", "training", "serving", "protos"):
            raise
        needed = f"The package {missing!r} is needed and not installed"
        raise BadSetting(f"{needed}: pip install '{_EXTRAS[half]}'.") from error
    if not speaks():
        return 0
    _say(json.dumps(result, indent=2, ensure_ascii=False) if as_json else command.render(result))
    remark = command.remark(result) if hasattr(command, "remark") and not as_json else None
    if remark:
        sys.stderr.write(f"{remark}\n")
    if hasattr(command, "stay") and not as_json:
        command.stay(result)
    complaint = command.complaint(result) if hasattr(command, "complaint") else None
    return _fail(name, complaint) if complaint else 0


def _settings(name: str, settings: "type[BaseModel]", words: list[str]) -> "tuple[BaseModel, bool]":
    from pydantic import ValidationError

    known, unknown = parser_of(name, settings).parse_known_args(words)
    if unknown:
        if not unknown[0].startswith("-"):
            raise BadSetting(
                f"The word {unknown[0]!r} has no flag before it; `crossbatch {name} --help` lists them all."
            )
        flags = [flag for field, info in settings.model_fields.items() for flag in _names(field, info)]
        hint = _meant(unknown, settings.model_fields) or _nearest(unknown[0], [*flags, "--json"])
        raise BadSetting(f"There is no {unknown[0]!r} here; {hint}`crossbatch {name} --help` lists all.")
    given = vars(known)
    as_json = given.pop("json", False)
    fields = {field: info for field, info in settings.model_fields.items() if not _positional(info)}
    texts, doubts = _given_variables(name, fields, COMMANDS, os.environ)
    for doubt in doubts:
        logging.getLogger("crossbatch").warning(doubt)
    variables = {field: text.split(",") if _many(fields[field]) else text for field, text in texts.items()}
    for field, value in (variables | given).items():
        if value == "" or value == [""]:  # an unset variable of a shell: an empty path would be this folder
            raise BadSetting(f"{spelled(field, settings.model_fields[field])} was given an empty value.")
    try:
        return settings.model_validate(variables | given), as_json
    except ValidationError as error:
        first = str((error.errors()[0]["loc"] or ("",))[0])
        variable = _variable_of(name, first) if first in variables and first not in given else ""
        raise BadSetting(_sentence(error, settings, variable)) from error


def _sentence(error: "ValidationError", settings: "type[BaseModel]", variable: str) -> str:
    """Say what is wrong with the first bad setting; `variable` is where it came from, if not from a flag."""
    first = error.errors()[0]
    if not first["loc"]:
        return f"{first['msg'].removeprefix('Value error, ')}."
    field = str(first["loc"][0])
    info = settings.model_fields[field]
    name = variable or spelled(field, info)
    if first["type"] == "missing":
        told = " ".join(str(info.description).split())
        return f"{name} is missing: {told.partition('. ')[0].rstrip('.')}."
    reason = first["msg"].removeprefix("Value error, ")
    return f"{name} cannot be {first['input']!r}: {reason[:1].lower()}{reason[1:]}."


def _names(field: str, info: "FieldInfo") -> list[str]:
    if _positional(info):
        return [field]
    flag = f"--{field.replace('_', '-')}"
    return [f"-{field}", flag] if len(field) == 1 else [flag]


def _options(name: str, field: str, info: "FieldInfo") -> dict[str, Any]:
    wanted: dict[str, Any] = {"help": _help(name, field, info)}
    if _positional(info):
        wanted["metavar"] = spelled(field, info)
        return wanted if info.is_required() else wanted | {"nargs": "?"}
    if info.annotation is bool:
        return wanted | {"action": argparse.BooleanOptionalAction if info.default else "store_true"}
    choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
    kinds = {getattr(kind, "__name__", "") for kind in (info.annotation, *get_args(info.annotation))}
    word = next((word for kind, word in _WORDS.items() if kind in kinds), field.rpartition("_")[2].upper())
    wanted["metavar"] = "|".join(choices) or word
    return wanted | {"action": "append"} if _many(info) else wanted


def _help(name: str, field: str, info: "FieldInfo") -> str:
    text = str(info.description).rstrip(".").replace("%", "%%")
    if _positional(info):
        return text
    if info.is_required():
        text += " (required)"
    elif info.default:
        text += f" (default {info.default})"
    return f"{text} [{_variable_of(name, field)}]"


def _many(info: "FieldInfo") -> bool:
    """Whether a flag may be given several times, and its variable holds a comma-separated list."""
    return get_origin(info.annotation) in (list, tuple)


def _positional(info: "FieldInfo") -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("positional"))


def _nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _meant(words: Sequence[str], fields: "Mapping[str, FieldInfo]") -> str:
    """Say how to give what an unknown flag is: a recipe's key (`--epochs 3`), or a setting (`--top-k`)."""
    name, _, value = words[0].lstrip("-").partition("=")
    if "set" in fields:
        from training.recipes.recipe import Recipe

        if (key := name.replace("-", "_")) in Recipe.model_fields:
            return f"did you mean '--set {key}={value or ' '.join(words[1:2]) or '...'}'? "
    if name == "device" and "provider" in fields:  # the word of training, and of most others
        return "did you mean '--provider'? "
    last = name.rpartition("-")[2]
    return f"did you mean {_names(last, fields[last])[0]!r}? " if last in fields else ""


def _variable_of(command: str, field: str) -> str:
    """Name the variable of a setting; with the command in it, as several commands have a port or a model."""
    return f"{_PREFIX}{command.upper()}_{field.upper()}"


def _given_variables(
    command: str, fields: Collection[str], commands: Collection[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the settings that the environment gives, by field, and a sentence for each that seems meant."""
    prefix = _variable_of(command, "")
    known = {_variable_of(command, field): field for field in fields}
    short = {name.removeprefix(prefix): name for name in known}
    loose = short | {name.removeprefix(_PREFIX): name for name in known}
    found, doubts = {}, []
    for name, value in environment.items():
        if not name.startswith(_PREFIX) or _is_link(name, value):
            continue
        if name in known:
            found[known[name]] = value
        elif name.startswith(prefix):
            nearest = difflib.get_close_matches(name.removeprefix(prefix), short, 1, 0.5)
            hint = f"did you mean {short[nearest[0]]}? " if nearest else ""
            raise BadSetting(
                f"The environment variable {name} is no setting; {hint}"
                f"`crossbatch {command} --help` lists all."
            )
        elif not any(name.startswith(_variable_of(other, "")) for other in commands):
            likely = difflib.get_close_matches(name.removeprefix(_PREFIX), loose, 1, _LIKELY)
            doubts += [
                f"the environment variable {name} is not read; {loose[each]} would be" for each in likely
            ]
    return found, doubts


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK.search(name)) or (
        name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    )


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    hint = "`crossbatch COMMAND --help` tells what each takes."
    return "\n".join(["usage: crossbatch COMMAND ...", "", *lines, "", hint])


def _mend_streams() -> None:
    """Let no output fail for a letter that the terminal lacks, nor for standard error that was closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lasts
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    print(text, flush=True)


def _fail(name: str, sentence: str) -> int:
    sys.stderr.write(f"crossbatch {name}: {sentence}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
