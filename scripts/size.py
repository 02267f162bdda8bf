"""Prints the lines and files of each room, and fails above its budget: `python scripts/size.py`."""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BUDGETS = {
    "training": 8_000,
    "serving/catalog": 1_670,
    "serving/model": 860,
    "serving/gallery": 8_604,
    "serving/indexing": 1_424,
    "serving/client": 1_460,
    "serving/rpc": 2_700,
    "serving/engine": 901,
    "serving/observability": 720,
    "serving/server": 740,
    "serving/web": 2_890,
    "serving": 1_091,
}
"""Most lines of a room; that of `serving` is for the files that lie in it alone."""
MOST_LINES, MOST_FILES, MOST_A_FILE = 30_949, 198, 400


def files(room: str) -> Iterator[Path]:
    """Find the Python files of a room and those of the page, those of rooms below it apart."""
    for path in sorted([*(ROOT / room).rglob("*.py"), *(ROOT / room).rglob("static/*.*")]):
        home = max((each for each in BUDGETS if path.is_relative_to(ROOT / each)), key=len)
        if home == room:
            yield path


def lines(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    """Print the table; return 1 if something is above its budget."""
    faults = []
    total = count = 0
    print(f"{'room':24}{'lines':>8}{'budget':>8}{'files':>7}")
    for room, budget in BUDGETS.items():
        sizes = {path: lines(path) for path in files(room)}
        print(f"{room:24}{sum(sizes.values()):8,}{budget:8,}{len(sizes):7}")
        total, count = total + sum(sizes.values()), count + len(sizes)
        if sum(sizes.values()) > budget:
            faults.append(f"{room} has {sum(sizes.values()):,} lines and may have {budget:,}")
        for path, size in sizes.items():
            if size > MOST_A_FILE:
                faults.append(f"{path.relative_to(ROOT)} has {size} lines and may have {MOST_A_FILE}")
    tests = sum(lines(path) for path in (ROOT / "tests").rglob("*.py"))
    print(f"{'serving and training':24}{total:8,}{MOST_LINES:8,}{count:7} of {MOST_FILES}")
    print(f"{'tests':24}{tests:8,}{total:8,}")
    if total > MOST_LINES:
        faults.append(f"serving and training have {total:,} lines and may have {MOST_LINES:,}")
    if count > MOST_FILES:
        faults.append(f"serving and training have {count} files and may have {MOST_FILES}")
    if tests > total:
        faults.append(f"the tests have {tests:,} lines, more than what they test")
    print(*faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
