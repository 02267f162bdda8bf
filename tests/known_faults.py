"""A fault of another project, and the test here that would show it."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent

Fault = tuple[str, str]
"""A file of the tests, by its path among them, and the name of a test in it."""


def check_test(fault: Fault) -> None:
    """Check that a test is there; whether it would show the fault is for who writes it to see."""
    file, name = fault
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
