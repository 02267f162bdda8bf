"""A file of hits: what is nearest to each of many photos, in their order, gone on with where it was cut.

Answers are appended to FILE.part, a line a photo, and brought to the disk call by call; when all are there,
FILE is made of them at once. A run that was cut finds them and asks for the rest.
"""

import csv
import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from serving.catalog.rows import path_text, tell_unread
from serving.catalog.walk import SUFFIXES, list_files
from serving.client import Hit
from serving.errors import BadData, BadSetting, CrossbatchError, cause_of
from serving.gallery.disk import disk_error, stamp_of, written_once
from serving.parquet import Rows, parquet_written
from serving.progress import progress

__all__ = ["Answer", "Photo", "listed", "write_hits"]

_COLUMNS: Mapping[str, str] = {
    "query": "string", "rank": "int32", "score": "float32", "key": "string", "label": "string",
    "uri": "string", "metadata": "string", "error": "string",
}  # fmt: skip
_AT_ONCE, _CALLS = 64, 4  # photos a call, and calls on their way: together as many as one call may have
_TOLD = 10  # errors in the status of a call
_ROWS = 65_536  # written at once

Photo = tuple[str, Path]
"""What a photo is called, and where it lies."""
Answer = list[Hit] | CrossbatchError
"""What is nearest to a photo, or why it could not be searched for."""


def listed(source: Path) -> tuple[list[Photo], list[str]]:
    """Return the images below a folder, sorted, or those whose paths are the lines of a text file.

    Beside them is what of the folder is not read, as a person is told it.
    """
    unread: list[str] = []
    if source.is_dir():
        found = list_files(source)
        unread = tell_unread(found.passed_over(SUFFIXES), found.left_out)
        images = (path for path in sorted(found.files) if path.suffix.lower() in SUFFIXES)
        photos = [(path_text(path), source / path) for path in images]
    elif source.suffix.lower() in SUFFIXES:
        raise BadSetting(f"{source} is one photo; give a folder of them, or a text file with a path a line")
    else:
        try:
            data = source.read_bytes().removeprefix(b"\xef\xbb\xbf")
        except OSError as error:
            raise BadData(f"the list {source} cannot be read: {cause_of(error)}") from error
        if b"\0" in data:  # UTF-16, say
            raise BadData(f"the list {source} is no UTF-8 text; save it as such, a path a line")
        lines = map(os.fsdecode, data.splitlines())
        photos = [(path_text(line), Path(line)) for line in lines if line.strip()]
    if not photos:
        told = "".join(f" ({each})" for each in unread)
        raise BadData(
            f"{source} gives no photo{told}; give a folder of images, or a text file with a path a line"
        )
    return photos, unread


def write_hits(
    photos: Sequence[Photo], search: Callable[[list[Path]], list[Answer]], out: Path, asked: Mapping[str, Any]
) -> dict[str, int]:
    """Search for all photos and write a row a hit to a new file; one that gets none has a row without.

    `search` is called in several threads at once. Answers of an earlier run to what is `asked` are taken.
    Returns the numbers of `photos`, of those `resumed`, of `hits` and of `errors`.
    """
    names = hashlib.sha256(repr([(name, stamp_of(path)) for name, path in photos]).encode()).hexdigest()
    with _begun(out, {**asked, "photos": names}) as (part, resumed), _written(out) as write:
        left = photos[resumed:]
        with progress(list[Photo](), "search", total=len(left), unit="photo") as bar:
            for some, answers in _answered(left, search):
                for (name, _), answer in zip(some, answers, strict=True):
                    part.write(json.dumps(_rows_of(name, answer)).encode() + b"\n")
                part.flush()
                os.fsync(part.fileno())
                bar.update(len(some))
        part.seek(0)
        counts = {"photos": len(photos), "resumed": resumed, "hits": 0, "errors": 0}
        rows = (row for line in islice(part, 1, None) for row in json.loads(line))
        while block := list(islice(rows, _ROWS)):
            write([{name: row.get(name) for name in _COLUMNS} for row in block])
            counts["hits"] += sum("rank" in row for row in block)
            counts["errors"] += sum("error" in row for row in block)
    return counts


@contextmanager
def _begun(out: Path, asked: Mapping[str, Any]) -> Iterator[tuple[IO[bytes], int]]:
    """Open the answers there are to what is asked, to add to them; gives the file and their number.

    It is removed when the block ends well, or nothing was answered.
    """
    path, told = Path(f"{out}.part"), json.dumps(asked).encode() + b"\n"
    try:
        file = path.open("a+b")
    except OSError as error:
        raise disk_error(error, f"the file {path}") from error
    with file as part:
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadSetting(
                f"another search writes to {path}; wait for it, or give another --out"
            ) from error
        part.seek(0)
        head = part.readline()
        if head != told and told.startswith(head):  # nothing yet, or it was cut
            part.truncate(0)
            part.write(told)
        elif head != told:
            raise BadSetting(
                f"{path} is of no search, or of another: of other photos, settings or model; give those again"
                " to go on with it, or remove it"
            )
        whole = [len(line) for line in part if line.endswith(b"\n")]
        part.truncate(len(told) + sum(whole))  # without a line that was cut
        try:
            yield part, len(whole)
        except BaseException as error:
            failure = disk_error(error, f"the file {path}") if isinstance(error, OSError) else error
            if part.seek(0, os.SEEK_END) == len(told):
                path.unlink()
            elif isinstance(failure, CrossbatchError):
                more = f"{str(failure).rstrip('.')}; the same command goes on from what was answered"
                raise failure.saying(more) from error
            if failure is error:
                raise
            raise failure from error
        path.unlink()


def _answered(
    photos: Sequence[Photo], search: Callable[[list[Path]], list[Answer]]
) -> Iterator[tuple[Sequence[Photo], list[Answer]]]:
    """Yield some photos after the other with their answers."""
    pool = ThreadPoolExecutor(_CALLS, thread_name_prefix="search")
    waiting: deque[tuple[Sequence[Photo], Future[list[Answer]]]] = deque()
    try:
        for start in range(0, len(photos), _AT_ONCE):
            some = photos[start : start + _AT_ONCE]
            waiting.append((some, pool.submit(_asked, search, [path for _, path in some])))
            if len(waiting) > _CALLS:
                some, future = waiting.popleft()
                yield some, future.result()
        for some, future in waiting:
            yield some, future.result()
    finally:  # calls that run are ended by whoever closes the client
        pool.shutdown(wait=False, cancel_futures=True)


def _asked(search: Callable[[list[Path]], list[Answer]], photos: list[Path]) -> list[Answer]:
    """Search for some photos; where all are bad, ten at a time, as a call tells of no more why they are."""
    answers = search(photos)
    if len(photos) > _TOLD and all(isinstance(each, CrossbatchError) for each in answers):
        return [each for i in range(0, len(photos), _TOLD) for each in search(photos[i : i + _TOLD])]
    return answers


def _rows_of(name: str, answer: Answer) -> list[dict[str, Any]]:
    """Return a row for each hit, or the one that says that there is none or why."""
    if isinstance(answer, CrossbatchError):
        return [{"query": name, "error": str(answer)}]
    return [
        {
            "query": name, "rank": rank, "score": round(hit.score, 6), "key": hit.key, "label": hit.label,
            "uri": hit.uri, "metadata": json.dumps(hit.metadata, ensure_ascii=False, sort_keys=True),
        }
        for rank, hit in enumerate(answer, start=1)
    ] or [{"query": name}]  # fmt: skip


@contextmanager
def _written(out: Path) -> Iterator[Callable[[Rows], Any]]:
    """Yield what writes rows to a new file, in the format that its name ends in."""
    if out.suffix == ".parquet":
        with parquet_written(out, _COLUMNS) as write:
            yield write
        return
    with written_once(out) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        if out.suffix == ".csv":
            lines = csv.DictWriter(file, list(_COLUMNS))
            lines.writeheader()
            yield lines.writerows
        else:
            yield lambda rows: file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
