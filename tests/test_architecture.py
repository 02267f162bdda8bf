"""Who may import whom, where the packages lie, and what may never be loaded by a server."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for half in ("training", "serving") for path in (ROOT / half).rglob("*.py"))


def test_each_module_says_its_names() -> None:
    silent = [path for path in SOURCES if "\n__all__ = " not in path.read_text()]
    assert {path.name for path in silent} == {"__init__.py"}, silent


def test_no_module_is_named_like_the_standard_library() -> None:
    assert {path.stem for path in SOURCES} & set(sys.stdlib_module_names) <= {"__init__"}


def test_the_front_door_loads_no_engine_before_it_knows_the_command() -> None:
    script = (
        "import sys, crossbatch; crossbatch.main(['--help'])\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'faiss', 'grpc', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True)
