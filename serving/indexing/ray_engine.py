"""Ray Data in place of threads: tasks decode, processes that hold the model encode, on one machine or several.

The one place where Ray is used. What is new or changed is cut into shards, in the order of the keys. Each is
decoded by one task and encoded, in batches as elsewhere, by one process, which writes what came out into a
folder that all machines see (`shards`). The gallery is filled from there, by this process alone.

Ray tries again what dies, but gives up on some of it, forgets how often it tried, and may wait without end. So
what is done is known from the folder alone, what is not is tried again a bounded number of times, and nobody
waits longer than `patience` for the next shard.
"""

import hashlib
import logging
import os
import pickle
import platform
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row
from serving.catalog.picture import Picture
from serving.cores import usable_cores
from serving.errors import (
    BadImage,
    BadSetting,
    CrossbatchError,
    InvalidArgument,
    ModelMismatch,
    Unavailable,
    cause_of,
)
from serving.gallery.disk import disk_error, make_folder
from serving.gallery.item import GalleryItem
from serving.indexing.pipeline import Examiner, Found, Outcome, Stored, examined, read_image
from serving.indexing.shards import Entry, finished, name_of, read_shard, write_shard
from serving.model.encoder import Encoder
from serving.model.preprocess import preprocess
from serving.model.provider import GPUS, Provider
from serving.model.spec import ModelSpec
from serving.progress import progress

__all__ = ["RayEngine"]

_ROUNDS: Final = 3  # in each of which Ray tries a shard again as often when a process dies
_MOST_BYTES: Final = 1 << 30  # of pixels in a shard: Arrow takes less than twice that in one value
_GONE: Final = ("ActorDiedError", "ActorUnavailableError", "NodeDiedError", "WorkerCrashedError", "ObjectLostError")
_MEMORY: Final = ("OutOfMemoryError", "ObjectStoreFullError")


class _Wanted(NamedTuple):
    """An image to be read by whichever machine; `known` and `side` are those of `read_image`."""

    id: str
    image: Picture
    known: bytes
    side: int | None


@dataclass(frozen=True)
class RayEngine:
    """An engine for `index_rows`."""

    model: Path
    spec: ModelSpec
    provider: Provider
    shards: Path
    """Folder for what is finished, which all machines see."""
    address: str = "local"
    decoders: int = 0
    encoders: int = 0
    shard_images: int = 256
    patience: float = 900.0

    def __post_init__(self) -> None:
        _import_ray()  # now, and not when all of a data set has been looked at

    def __call__(
        self, examiner: Examiner, rows: Iterable[Stored], *, total: int, batch: int, threads: int
    ) -> Generator[tuple[Row, Outcome | OSError | BadImage | InvalidArgument]]:
        """Yield what needs no reading, then read and embed the rest, then yield that, in order."""
        waiting = list[tuple[Row, GalleryItem | None, _Wanted]]()
        look = partial(self._look, examiner)
        with progress((), "embed", total=total, unit="image") as bar:
            for row, future in examined(look, rows, ahead=4096, threads=threads):
                try:
                    stored, found = future.result()
                except (OSError, InvalidArgument) as error:
                    yield row, error
                    continue
                if isinstance(found, _Wanted):
                    waiting.append((row, stored, found))
                else:
                    yield row, found
                    bar.update()
            wanted = {each.id: each for _, _, each in waiting}
            where = finished(self.shards, self.spec.fingerprint, wanted)
            bar.update(len(where))
            shards = self._cut([each for each in wanted.values() if each.id not in where], batch)
            if shards:
                self._make(shards, batch, threads, bar.update)
            where |= {each.id: name for name, shard in shards.items() for each in shard}
        read = lru_cache(4)(partial(read_shard, self.shards))  # images of one lie mostly together
        for row, stored, each in waiting:
            entry = read(where[each.id])[each.id]
            if isinstance(entry, Exception):
                yield row, entry
                continue
            try:
                yield row, examiner.by_content(row, stored, *entry)
            except InvalidArgument as error:
                yield row, error

    def _look(
        self, examiner: Examiner, row: Row, stored: GalleryItem | None
    ) -> tuple[GalleryItem | None, Outcome | _Wanted]:
        stamp = row.image.stamp()
        if (outcome := examiner.by_stamp(row, stored, stamp)) is not None:
            return stored, outcome
        known, side = examiner.reading(stored)
        told = (row.key, str(row.image), stamp, known, side, self.spec.fingerprint, self.provider)
        return stored, _Wanted(hashlib.sha256(repr(told).encode()).hexdigest()[:32], row.image, known, side)

    def _cut(self, wanted: Sequence[_Wanted], batch: int) -> dict[str, list[_Wanted]]:
        """Cut what is to be read into shards of whole batches, by their names."""
        size = -(-self.shard_images // batch) * batch
        size = max(1, min(size, _MOST_BYTES // (3 * self.spec.image_size**2)))
        parts = (list(wanted[start : start + size]) for start in range(0, len(wanted), size))
        return {name_of(each.id for each in part): part for part in parts}

    def _make(
        self, shards: dict[str, list[_Wanted]], batch: int, threads: int, advance: Callable[[int], Any]
    ) -> None:
        """Have all shards written, by as many rounds as it takes."""
        try:
            make_folder(self.shards)
        except OSError as error:
            raise disk_error(error, f"the folder {self.shards}") from error
        left, faults = dict(shards), dict[str, str]()
        cores = threads or usable_cores()
        with _connected(self.address, cores) as ray:
            for number in range(_ROUNDS):
                last = number == _ROUNDS - 1
                for made in self._results(ray, left, batch, threads, strict=number == _ROUNDS - 1):
                    name = made["name"]
                    if fault := made["fault"] or self._unreadable(left[name], made):
                        faults[name] = f"the machine {made['node']}: {fault}"
                    else:
                        advance(len(left.pop(name)))
                if not left:
                    return
                if left.keys() == shards.keys() == faults.keys():  # of which trying again cures none
                    break
        first = next((faults[name] for name in left if name in faults), "processes that were lost")
        raise Unavailable(
            f"{len(left)} of {len(shards)} shards could not be made, the first on {first}; {self._kept()}"
        )

    def _unreadable(self, shard: Sequence[_Wanted], made: dict[str, Any]) -> str:
        """Say what a machine reads or writes elsewhere than this one does."""
        if not (self.shards / f"{made['name']}.json").exists():
            return f"what it writes to {self.shards} is not there on this machine: give --shards a folder that all see"
        for each in shard:
            if each.id == made["unread"]:
                with suppress(OSError, BadImage):
                    each.image.read_bytes()
                    return (
                        f"{each.image} cannot be read there ({made['why']}), and here it can: let all machines have"
                        " the data at the same path"
                    )
        return ""

    def _kept(self) -> str:
        return f"what is finished is kept in {self.shards}, and the same command goes on from there"

    def _results(
        self, ray: Any, shards: dict[str, list[_Wanted]], batch: int, threads: int, *, strict: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield what is told of each shard when it has been tried; of lost ones nothing, unless `strict`."""
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = 0 if strict else -1
        items = [{"name": name, "images": pickle.dumps(shard)} for name, shard in shards.items()]
        encode = {
            "model": self.model, "spec": self.spec, "provider": self.provider, "shards": self.shards,
            "batch": batch, "threads": threads,
        }  # fmt: skip
        gpu = self.provider in GPUS
        results = (
            ray.data.from_items(items, override_num_blocks=len(items))
            .map(
                _decode,
                fn_kwargs={"spec": self.spec},
                num_cpus=1,
                compute=ray.data.TaskPoolStrategy(self.decoders or None),
            )
            .map(
                _Encode,
                fn_constructor_kwargs=encode,
                num_cpus=0,
                num_gpus=1 if gpu else 0,
                compute=ray.data.ActorPoolStrategy(size=min(self._encoders(ray), len(items))),
            )
        )
        given = queue.Queue[Any]()
        threading.Thread(target=_pass_on, args=(results, given), daemon=True).start()
        while True:
            try:
                result = given.get(timeout=self.patience)
            except queue.Empty:
                raise Unavailable(
                    f"Ray has finished no shard for {self.patience:g} seconds: it has no free core for them, or has lost"
                    f" its processes (`ray status` tells), or --patience is too short; {self._kept()}"
                ) from None
            if result is None:
                return
            if isinstance(result, Exception):
                raise Unavailable(f"{_told(result)}; {self._kept()}") from result
            yield result

    def _encoders(self, ray: Any) -> int:
        if self.encoders:
            return self.encoders
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self.provider not in GPUS:
            return max(1, sum(node.get("CPU", 0) > 0 for node in nodes))
        if count := int(sum(node.get("GPU", 0) for node in nodes)):
            return count
        raise BadSetting(f"the provider {self.provider} needs a GPU, and Ray knows of none; take --provider cpu")


def _pass_on(results: Any, given: "queue.Queue[Any]") -> None:
    """Hand on rows as they come, then None or what has gone wrong: nobody is to wait for Ray itself."""
    try:
        for result in results.iter_rows():
            given.put(result)
        given.put(None)
    except Exception as error:
        given.put(error)


def _told(error: BaseException) -> str:
    """Say in words of ours what Ray could not do."""
    chain, cause = list[BaseException](), error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = getattr(cause, "cause", None) or cause.__cause__
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    if names & {*_MEMORY}:
        return (
            "a machine has run out of memory, and Ray has ended what ran there: fewer --decoders or --encoders, or a"
            " smaller --shard-images or --batch, need less"
        )
    if names & {*_GONE}:
        return "a process that worked on a shard was killed, or its machine lost, again and again"
    return f"Ray has failed: {cause_of(chain[-1])}"


@contextmanager
def _connected(address: str, cores: int) -> Iterator[Any]:
    """Start Ray on this machine alone, or take part in a cluster; all of that ends with the block."""
    ray = _import_ray()
    local = {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **(local if address == "local" else {}),
        )
    except Exception as error:  # of a dozen classes
        ray.shutdown()
        raise Unavailable(
            f"Ray at {address} cannot be used: {cause_of(error)}; give the --ray-address of a cluster of the same"
            " versions of Ray and Python, or leave it out"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_task_oom_retries", str(_ROUNDS))  # which has no end by itself
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # of 40 s each, where no cluster answers
    try:
        import ray.data
    except ImportError as error:
        raise BadSetting(
            "Ray is not installed, which --engine ray needs; pip install 'crossbatch[cluster]', on each machine"
        ) from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it tells of each run, and all that is tried again
    return ray


def _decode(row: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Read the images of a shard, on some machine."""
    prepare = partial(
        preprocess, size=spec.image_size, crop_fraction=spec.crop_fraction, resampling=spec.resampling
    )
    found = dict[str, Found | OSError | BadImage]()
    unread = why = ""
    for id, image, known, side in pickle.loads(row["images"]):  # noqa: S301 - which this run has made
        try:
            found[id] = read_image(image, image.stamp(), prepare, known=known, side=side)
        except BadImage as error:
            found[id] = error
        except OSError as error:
            found[id], unread, why = error, id, cause_of(error)
    return {"name": row["name"], "found": pickle.dumps(found), "unread": unread, "why": why}


class _Encode:
    """Encodes shards, in a process of its own on some machine, and writes them."""

    def __init__(
        self, model: Path, spec: ModelSpec, provider: Provider, shards: Path, batch: int, threads: int
    ) -> None:
        self._fingerprint, self._shards, self._batch = spec.fingerprint, shards, batch
        self._fault = ""
        try:
            self._encoder = Encoder(model, threads=threads, provider=provider)
            if self._encoder.spec.fingerprint != spec.fingerprint:
                raise ModelMismatch(
                    f"{model} is there a model of the fingerprint {self._encoder.spec.fingerprint[:12]}, and here of"
                    f" {spec.fingerprint[:12]}; let all machines have the same file"
                )
        except CrossbatchError as error:  # one that is raised here ends all of Ray's work, and in other words
            self._fault = f"{error}; let all machines have the model file at the same path"

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Encode a shard, and tell whether it is written."""
        fault = self._fault
        try:
            if not fault:
                self._write(pickle.loads(row["found"]))  # noqa: S301 - which this run has made
        except CrossbatchError as error:
            fault = str(error)
        except OSError as error:
            fault = str(disk_error(error, f"the folder {self._shards}"))
        return {
            "name": row["name"], "unread": row["unread"], "why": row["why"], "fault": fault,
            "node": platform.node(),
        }  # fmt: skip

    def _write(self, found: dict[str, Found | OSError | BadImage]) -> None:
        pixels = {id: it.pixels for id, it in found.items() if isinstance(it, Found) and it.pixels is not None}
        ids, vectors = list(pixels), dict[str, NDArray[np.float32]]()
        for start in range(0, len(ids), self._batch):
            some = ids[start : start + self._batch]
            embedded = self._encoder.encode(np.stack([pixels[id] for id in some]))  # (B, d)
            vectors |= zip(some, embedded, strict=True)
        entries: dict[str, Entry] = {
            id: (replace(it, pixels=None), vectors.get(id)) if isinstance(it, Found) else it
            for id, it in found.items()
        }
        write_shard(self._shards, entries, self._fingerprint)
