"""Write docs/commands.md anew from the settings themselves: `python scripts/commands.py`."""

import importlib
import sys
from pathlib import Path
from typing import get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import crossbatch  # noqa: E402
from training.recipes.recipe import Recipe  # noqa: E402

_HEAD = """\
# Commands and settings

Made from the code by `scripts/commands.py`; a test compares. Each flag can also be given by the environment
variable `CROSSBATCH_<COMMAND>_<FLAG>`, such as `CROSSBATCH_SERVE_MAX_BATCH=16` for `--max-batch 16` of
`crossbatch serve`; a flag wins. Where a flag may be given several times, its variable takes a comma between
two values. A variable of the command that is no setting is an error that names the nearest one, and one
that lacks the command (`CROSSBATCH_MAX_BATCH`) a warning; what Kubernetes sets for a service of that name
is passed over. Every command takes `--help`, and `--json` for a result that scripts can read. Status 0 is
success; 2 is an error that one sentence on standard error explains.
"""
_RECIPE = """
## Recipe keys

A recipe is a YAML file of these keys, by the name of one that comes along (`crossbatch train --list`) or by
its path; `--set key=value` changes one. What the method's keys mean for the loss is in
[method.md](method.md).
"""


def page() -> str:
    """Return the page's text."""
    parts = [_HEAD]
    for name, (module, summary) in crossbatch.COMMANDS.items():
        settings: type[BaseModel] = importlib.import_module(module).Settings
        parts.append(f"\n## crossbatch {name}\n\n{summary}.\n")
        rows = [(crossbatch.spelled(field, info), info) for field, info in settings.model_fields.items()]
        parts.append(_table("flag", rows))
    parts.append(_RECIPE)
    parts.append(_table("key", list(Recipe.model_fields.items())))
    return "\n".join(parts)


def _table(first: str, rows: list[tuple[str, FieldInfo]]) -> str:
    lines = [f"| {first} | default | range | what it says |", "| --- | --- | --- | --- |"]
    for name, info in rows:
        told = " ".join(str(info.description).split()).rstrip(".").replace("|", "\\|")
        lines.append(f"| `{name}` | {_default(info)} | {_range(info)} | {told} |")
    return "\n".join(lines) + "\n"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if isinstance(info.default, bool):
        return str(info.default).lower()
    return "" if info.default in (None, [], (), {}) else str(info.default)


def _range(info: FieldInfo) -> str:
    choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
    if choices:
        return ", ".join(choices)
    words = []
    for bound in info.metadata:
        for kind, word in ((Ge, "from"), (Gt, "above"), (Le, "to"), (Lt, "below")):
            if isinstance(bound, kind):
                words.append(f"{word} {getattr(bound, kind.__name__.lower()):,}")
    return " ".join(words)


if __name__ == "__main__":
    (ROOT / "docs" / "commands.md").write_text(page(), encoding="utf-8")
