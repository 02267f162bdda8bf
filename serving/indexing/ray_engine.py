"""Ray Data in place of threads: tasks decode, processes that hold the model encode, here or on many machines.

What is new or changed is cut into shards, in the order of the keys. Each is decoded by one task and encoded,
in batches as elsewhere, by one process, which writes what came out into a folder that all machines see. The
gallery is filled from there, by this process alone.

Ray tries again what dies, but gives up on some of it, forgets how often it tried, and may wait without end.
So the folder alone says what is done, the rest is tried again a bounded number of times, and nobody waits
longer than `patience` for the next shard.
"""

import hashlib
import logging
import os
import pickle
import platform
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.catalog.catalog import Row
from serving.catalog.picture import Picture
from serving.cores import usable_cores
from serving.errors import BadImage, BadSetting, CrossbatchError, InvalidArgument, Unavailable, cause_of
from serving.gallery.disk import disk_error, make_folder
from serving.gallery.item import GalleryItem
from serving.indexing.pipeline import Examiner, Found, Outcomes, Stored, examined, read_image
from serving.indexing.shards import Entry, finished, name_of, read_shard, write_shard
from serving.model.encoder import Encoder
from serving.model.preprocess import preprocess
from serving.model.provider import GPUS, Provider
from serving.model.spec import ModelSpec
from serving.progress import progress

__all__ = ["RayEngine"]

_ROUNDS: Final = 3  # in each of which Ray itself tries a few times
_MOST_BYTES: Final = 1 << 30  # of pixels in a shard: Arrow takes less than twice that in one value
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to its makers
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # by a thread of its own that outlives a run
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # of 40 s each, where no cluster answers
    "RAY_task_oom_retries": str(_ROUNDS),  # which has no end by itself
}


class _Wanted(NamedTuple):
    """An image to be read by whichever machine; `known` and `side` are those of `read_image`."""

    id: str
    image: Picture
    stamp: tuple[int, int]
    known: bytes
    side: int | None


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """An engine for `index_rows`; what is not told here is a setting of `crossbatch index`."""

    model: Path
    spec: ModelSpec
    provider: Provider
    shards: Path
    ray_address: str
    decoders: int
    encoders: int
    shard_images: int
    patience: float
    used: set[str] = field(default_factory=set)
    """Names of the shards of which runs have taken something."""

    def __post_init__(self) -> None:  # now, and not when all of a data set has been looked at
        if self.shards.exists() and not self.shards.is_dir():
            raise BadSetting(f"--shards {self.shards} is no folder; give one, or leave it out")
        _import_ray()

    def __call__(
        self, examiner: Examiner, rows: Iterable[Stored], *, total: int, batch: int, threads: int
    ) -> Outcomes:
        """Yield what needs no reading, then have the rest read and embedded, and yield that."""
        waiting = list[tuple[Row, GalleryItem | None, _Wanted]]()
        look = partial(self._look, examiner)
        with progress(range(0), "embed", total=total, unit="image") as bar:
            for row, future in examined(look, rows, ahead=4096, threads=threads):
                try:
                    stored, found = future.result()
                except (OSError, InvalidArgument) as error:
                    stored, found = None, error
                if isinstance(found, _Wanted):
                    waiting.append((row, stored, found))
                else:
                    yield row, found
                    bar.update()
            wanted = [each for _, _, each in waiting]
            where = finished(self.shards, self.spec.fingerprint, {each.id for each in wanted})
            bar.update(len(where))
            shards = self._cut([each for each in wanted if each.id not in where], batch)
            if shards:
                self._make(shards, batch, threads, bar.update)
        where |= {each.id: name for name, shard in shards.items() for each in shard}
        self.used.update(where.values())
        read = lru_cache(4)(self._read)  # images of one lie mostly together
        for row, stored, each in waiting:
            entry = read(where[each.id])[each.id]
            try:
                yield row, entry if isinstance(entry, Exception) else examiner.by_content(row, stored, *entry)
            except InvalidArgument as error:
                yield row, error

    def _look(self, examiner: Examiner, row: Row, stored: GalleryItem | None) -> tuple[Any, Any]:
        """Return the item, and what becomes of a row, or `_Wanted` where its file must be read."""
        stamp = row.image.stamp()
        if (outcome := examiner.by_stamp(row, stored, stamp)) is not None:
            return stored, outcome
        known, side = examiner.reading(stored)
        told = (row.key, str(row.image), stamp, known, side, self.spec.fingerprint, self.provider)
        id = hashlib.sha256(repr(told).encode()).hexdigest()[:32]
        return stored, _Wanted(id, row.image, stamp, known, side)

    def _cut(self, wanted: Sequence[_Wanted], batch: int) -> dict[str, Sequence[_Wanted]]:
        """Cut what is to be read into shards of whole batches, by their names."""
        size = -(-self.shard_images // batch) * batch
        size = max(1, min(size, _MOST_BYTES // (3 * self.spec.image_size**2)))
        parts = (wanted[start : start + size] for start in range(0, len(wanted), size))
        return {name_of(each.id for each in part): part for part in parts}

    def _make(
        self, shards: dict[str, Sequence[_Wanted]], batch: int, threads: int, advance: Callable[[int], Any]
    ) -> None:
        """Have all shards written, in as many rounds as that takes."""
        try:
            make_folder(self.shards)
        except OSError as error:
            raise disk_error(error, f"the folder {self.shards}") from error
        left, faults = dict(shards), dict[str, str]()
        with _connected(self.ray_address, threads or usable_cores()) as ray:
            for number in range(_ROUNDS):
                for made in self._results(ray, left, batch, threads, strict=number == _ROUNDS - 1):
                    name = made["name"]
                    if fault := made["fault"] or self._unseen(left[name], made):
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

    def forget(self) -> None:
        """Remove the shards that a run has used, and their folder where no others are in it."""
        with suppress(OSError):
            for name in self.used:
                for end in ("json", "npz"):
                    (self.shards / f"{name}.{end}").unlink(missing_ok=True)
            self.shards.rmdir()

    def _read(self, name: str) -> dict[str, Entry]:
        try:
            return read_shard(self.shards, name)
        except Exception as error:  # of zipfile's and NumPy's own kinds, too
            raise Unavailable(
                f"the shard {self.shards / name}.npz was damaged or removed while the run went on"
                f" ({cause_of(error)}); the same command makes it again"
            ) from error

    def _unseen(self, shard: Sequence[_Wanted], made: dict[str, Any]) -> str:
        """Say where a machine reads or writes another place than this one."""
        if not (self.shards / f"{made['name']}.json").exists():
            return (
                f"what it writes to {self.shards} is not here; give --shards a folder that all machines see"
            )
        for image in (each.image for each in shard if each.id == made["unread"]):
            with suppress(OSError, BadImage):
                image.read_bytes()
                return (
                    f"{image} cannot be read there ({made['why']}), and here it can; let all machines have"
                    " the data at the same path"
                )
        return ""

    def _kept(self) -> str:
        return f"what is finished is kept in {self.shards}, and the same command goes on from there"

    def _results(
        self, ray: Any, shards: dict[str, Sequence[_Wanted]], batch: int, threads: int, *, strict: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield what is told of each shard when it was tried; what was lost is an error if `strict`."""
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = 0 if strict else -1
        rows = [{"name": name, "images": pickle.dumps(shard)} for name, shard in shards.items()]
        given = {"spec": self.spec, "model": self.model, "provider": self.provider, "shards": self.shards}
        encoders = min(self.encoders or self._count_encoders(ray), len(rows))
        results = (
            ray.data.from_items(rows, override_num_blocks=len(rows))
            .map(
                _decode,
                fn_kwargs={"spec": self.spec},
                num_cpus=1,
                compute=ray.data.TaskPoolStrategy(self.decoders or None),
            )
            .map(
                _Encode,
                fn_constructor_kwargs=given | {"batch": batch, "threads": threads},
                num_cpus=0,  # as in the plain engine, decoding and encoding share the cores
                num_gpus=int(self.provider in GPUS),
                compute=ray.data.ActorPoolStrategy(size=encoders),
            )
        )
        arriving = queue.Queue[Any]()
        threading.Thread(target=_pass_on, args=(results, arriving), daemon=True).start()
        with suppress(queue.Empty):
            while (result := arriving.get(timeout=self.patience)) is not None:
                if not isinstance(result, Exception):
                    yield result
                elif strict:
                    raise Unavailable(f"{_told(result)}; {self._kept()}") from result
                else:
                    return
            return
        raise Unavailable(
            f"Ray has finished no shard for {self.patience:g} seconds: it has no free core, or its processes"
            " hang or die again and again (`ray status` tells), or --patience is too short;"
            f" {self._kept()}"
        )

    def _count_encoders(self, ray: Any) -> int:
        """Count the machines of the cluster, or their GPUs."""
        nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self.provider not in GPUS:
            return max(1, sum(node.get("CPU", 0) > 0 for node in nodes))
        if count := sum(int(node.get("GPU", 0)) for node in nodes):
            return count
        raise BadSetting(f"--provider {self.provider} needs a GPU, and Ray knows of none; take cpu")


def _pass_on(results: Any, arriving: "queue.Queue[Any]") -> None:
    """Hand on rows as they come, then None or what has gone wrong: nobody is to wait for Ray itself."""
    try:
        for result in results.iter_rows():
            arriving.put(result)
        arriving.put(None)
    except Exception as error:
        arriving.put(error)


def _told(error: Exception) -> str:
    """Say what Ray could not do."""
    text = f"{type(error).__name__} {error}"  # which names what is behind it, too
    if any(what in text for what in ("OutOfMemoryError", "ObjectStoreFullError", "low on memory")):
        return (
            "a machine has run out of memory, and Ray has ended what ran there: fewer --decoders or"
            " --encoders, or a smaller --shard-images or --batch, need less"
        )
    if any(f"{what}Error" in text for what in ("ActorDied", "NodeDied", "ObjectLost", "WorkerCrashed")):
        return "a process that worked on a shard was killed, or its machine lost, again and again"
    return f"Ray has failed: {cause_of(error)}"


@contextmanager
def _connected(address: str, cores: int) -> Iterator[Any]:
    """Start Ray on this machine alone, or take part in a cluster; either ends with the block."""
    ray = _import_ray()
    alone = {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    with redirect_stdout(sys.stderr):  # Ray tells there of processes that died, until it has ended
        try:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
            ray.init(address=address, **quiet, **(alone if address == "local" else {}))
        except Exception as error:  # of a dozen classes
            ray.shutdown()
            raise Unavailable(
                f"Ray at {address} cannot be used: {cause_of(error)}; give the --ray-address of a cluster of"
                " the same versions of Ray and Python and with the same token, or leave it out"
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _import_ray() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray.data
    except ImportError as error:
        raise BadSetting(
            "Ray is not installed, which --engine ray needs; install crossbatch[cluster], on each machine"
        ) from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it tells of all that is tried again
    return ray


def _decode(row: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Read the images of a shard, on some machine."""
    prepare = partial(
        preprocess, size=spec.image_size, crop_fraction=spec.crop_fraction, resampling=spec.resampling
    )
    found, changed = dict[str, Found | OSError | BadImage](), set[str]()
    unread = why = ""
    for id, image, stamp, known, side in pickle.loads(row["images"]):  # noqa: S301 - which this run has made
        try:
            if (now := image.stamp()) != stamp:
                changed.add(id)
            found[id] = read_image(image, now, prepare, known=known, side=side)
            if image.stamp() != now:
                changed.add(id)
        except BadImage as error:
            found[id] = error
        except OSError as error:
            found[id], unread, why = error, id, cause_of(error)
    told = {"name": row["name"], "unread": unread, "why": why}
    return told | {"found": pickle.dumps(found), "changed": pickle.dumps(changed)}


class _Encode:
    """Encodes shards and writes them, in a process of its own on some machine."""

    def __init__(self, *, spec: ModelSpec, shards: Path, batch: int, **of_encoder: Any) -> None:
        self._fingerprint, self._shards, self._batch = spec.fingerprint, shards, batch
        self._load = lru_cache(1)(partial(_load, spec.fingerprint, **of_encoder))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Encode a shard; `fault` tells why it is not written: an error would end the work on all others."""
        fault = ""
        try:
            found, changed = pickle.loads(row["found"]), pickle.loads(row["changed"])  # noqa: S301 - of this run
            self._write(self._load(), found, changed)
        except CrossbatchError as error:
            fault = str(error)
        except OSError as error:
            fault = str(disk_error(error, f"the folder {self._shards}"))
        told = {name: row[name] for name in ("name", "unread", "why")}
        return told | {"fault": fault, "node": platform.node()}

    def _write(
        self, encoder: Encoder, found: dict[str, Found | OSError | BadImage], changed: Set[str]
    ) -> None:
        new = [(id, it.pixels) for id, it in found.items() if isinstance(it, Found) and it.pixels is not None]
        vectors = dict[str, NDArray[np.float32]]()
        for start in range(0, len(new), self._batch):
            ids, pixels = zip(*new[start : start + self._batch], strict=True)
            vectors |= zip(ids, encoder.encode(np.stack(pixels)), strict=True)  # (B, d)
        entries: dict[str, Entry] = {
            id: (replace(it, pixels=None), vectors.get(id)) if isinstance(it, Found) else it
            for id, it in found.items()
        }
        write_shard(self._shards, entries, self._fingerprint, changed=changed)


def _load(fingerprint: str, model: Path, threads: int, provider: Provider) -> Encoder:
    """Load the model, which must be at the same path everywhere."""
    try:
        encoder = Encoder(model, threads=threads, provider=provider)
    except CrossbatchError as error:
        raise error.saying(f"{error}; let all machines have the model at the same path") from error
    if (found := encoder.spec.fingerprint) != fingerprint:
        raise Unavailable(
            f"{model} has the fingerprint {found[:12]} there, and {fingerprint[:12]} here; let all machines"
            " have the same file"
        )
    return encoder
