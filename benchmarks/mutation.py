"""Whether the tests notice when a line is wrong: `python benchmarks/mutation.py --seed 0 --lines 30`.

First the suite runs once under coverage, which tells the tests of each line (`--map` keeps that in a file,
or takes it from there). Then lines of serving and training are drawn at random among those within functions
that can be changed in one of the ways below; each is changed in a copy of the checkout, and its tests run
until one fails. A line that no test runs is not caught.
"""

import argparse
import ast
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_TESTS = 60
"""Most tests that are run for a line; the ones of the nearest name first."""
SECONDS = 600.0
"""That long they may take; what hangs is caught."""

OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub,
    ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutation:
    """A change of one line of a file."""

    def __init__(self, path: Path, line: int, before: str, after: str) -> None:
        """Keep it."""
        self.path, self.line, self.before, self.after = path, line, before, after

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def mutations(path: Path) -> Iterator[Mutation]:
    """Give every change of a file: a comparison or an operator turned, a constant moved, a `not` lost."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)]
    inner = {node: None for each in functions for statement in each.body for node in ast.walk(statement)}
    for node in inner:
        if not isinstance(node, ast.expr) or node.lineno != node.end_lineno:
            continue
        changed = _changed(node)
        if changed is not None:
            line = lines[node.lineno - 1]
            # Offsets count bytes of UTF-8.
            raw = line.encode()
            after = raw[: node.col_offset] + f"({changed})".encode() + raw[node.end_col_offset :]
            yield Mutation(path, node.lineno, line, after.decode())


def _changed(node: ast.expr) -> str | None:
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITES:
            node = ast.Compare(node.left, [OPPOSITES[type(op)]()], node.comparators)  # type: ignore[list-item]
        case ast.BinOp(op=op) if type(op) in OPPOSITES:
            node = ast.BinOp(node.left, OPPOSITES[type(op)](), node.right)  # type: ignore[arg-type]
        case ast.BoolOp(op=op):
            node = ast.BoolOp(OPPOSITES[type(op)](), node.values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            node = node.operand
        case ast.Constant(value=bool() as value):
            node = ast.Constant(not value)
        case ast.Constant(value=int() as value):
            node = ast.Constant(value + 1)
        case _:
            return None
    return ast.unparse(ast.fix_missing_locations(node))


def tests_of(database: Path, path: Path, line: int) -> list[str]:
    """Name the tests that run a line, by what coverage kept of a run with contexts."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "select distinct context.context from arc join file on file.id = arc.file_id "
            "join context on context.id = arc.context_id "
            "where file.path like ? and abs(arc.tono) = ? and context.context like '%|run'",
            (f"%/{path}", line),
        )
        names = sorted({name.removesuffix("|run") for (name,) in rows})
    stem = path.stem.removeprefix("_")
    return sorted(names, key=lambda name: stem not in name)


def record(database: Path) -> None:
    """Run the suite once, and keep which test ran which line."""
    words = ["pytest", "-q", "--cov", "--cov-context=test", "--cov-report=", "--timeout=300"]
    environment = os.environ | {"COVERAGE_FILE": str(database)}
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, check=False)


def is_caught(mutation: Mutation, tests: Sequence[str]) -> bool:
    """Change the line in a copy of the checkout, and tell whether one of the tests fails."""
    if not tests:
        return False
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        lines = (copy / mutation.path).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[mutation.line - 1] = mutation.after + "\n"
        (copy / mutation.path).write_text("".join(lines), encoding="utf-8")
        words = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", *tests[:MOST_TESTS]]
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy)},
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
    return done.returncode != 0


def main() -> int:
    """Draw lines, change each, and print what became of it; 1 if less than `--least` were caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=30)
    parser.add_argument("--least", type=int, default=25)
    parser.add_argument("--map", type=Path, default=Path(tempfile.gettempdir()) / "crossbatch-coverage.db")
    given = parser.parse_args()
    if not given.map.exists():
        record(given.map)
    sources = [path for room in ("serving", "training") for path in (ROOT / room).rglob("*.py")]
    found = [each for path in sorted(sources) for each in mutations(path.relative_to(ROOT))]
    drawn = random.Random(given.seed).sample(found, given.lines)
    caught = 0
    for mutation in drawn:
        fate = is_caught(mutation, tests_of(given.map, mutation.path, mutation.line))
        caught += fate
        print("caught " if fate else "MISSED ", mutation, flush=True)
    print(f"{caught} of {len(drawn)} caught")
    return int(caught < given.least)


if __name__ == "__main__":
    sys.exit(main())
