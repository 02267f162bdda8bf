"""Nothing of ours uses what another package keeps to itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for room in ("serving", "training") for path in (ROOT / room).rglob("*.py"))
PUBLIC = ("_asdict", "_replace", "_fields", "_make", "_exit")
"""Documented all the same: those of named tuples, and `os._exit`."""
ALLOWED: dict[str, str] = {}
"""`file:name` of what is used all the same, with the reason; at most three."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def names_of(tree: ast.AST) -> Iterator[str]:
    """Every private name that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def uses_of(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Every private name that a file takes from elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in ours and node.attr not in PUBLIC:
                yield node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            parts = [*module.split("."), *(part for each in node.names for part in each.name.split("."))]
            if module.split(".")[0] not in ("serving", "training", "protos"):
                yield from (part for part in parts if is_private(part))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            for each in node.args[1:2]:
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and is_private(each.value):
                    yield each.value


def test_no_private_attribute_of_another_package_is_used() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    ours = {name for tree in trees.values() for name in names_of(tree)}
    found = {
        f"{path.relative_to(ROOT)}:{name}" for path, tree in trees.items() for name in uses_of(tree, ours)
    }
    assert found == set(ALLOWED)
    assert len(ALLOWED) <= 3


def test_a_private_attribute_is_noticed() -> None:
    tree = ast.parse(
        "import grpc._channel\nfrom asyncio import _x\nself._mine = y._theirs\ngetattr(z, '_w')\n"
    )
    assert set(uses_of(tree, set(names_of(tree)))) == {"_channel", "_x", "_theirs", "_w"}
