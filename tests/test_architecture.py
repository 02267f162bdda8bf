"""Who may import whom, where the packages lie, and what may never be loaded by a server."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for half in ("training", "serving") for path in (ROOT / half).rglob("*.py"))


def test_packages_are_those_of_this_distribution() -> None:
    for name in ("training", "serving", "protos", "crossbatch"):
        assert Path(str(importlib.import_module(name).__file__)).is_relative_to(ROOT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_module_says_its_job_and_its_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree)
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))
    assigned = [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    assert path.name == "__init__.py" or "__all__" in assigned


def test_exported_names_exist() -> None:
    for path in SOURCES:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{module.__name__}.{name}"


def test_no_module_is_named_like_the_standard_library() -> None:
    assert {path.stem for path in SOURCES} & set(sys.stdlib_module_names) <= {"__init__"}


def test_the_whole_of_serving_runs_with_torch_blocked() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.is_relative_to(ROOT / "serving")
    ]
    script = "import sys; sys.modules['torch'] = None\nimport " + ", ".join(modules)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_the_front_door_loads_no_engine_before_it_knows_the_command() -> None:
    script = (
        "import sys, crossbatch; crossbatch.main(['--help'])\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'faiss', 'grpc', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True)
