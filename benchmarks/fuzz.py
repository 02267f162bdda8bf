"""A server fed with what is nearly right: `python benchmarks/fuzz.py [--count 100000] [--seed 0]`.

`crossbatch serve` runs as a process with a model of a few nodes, or the one given. It gets at least --count
cases, half of them images and half messages, many at once. The images are JPEG, PNG, WebP, GIF, BMP, TIFF and
AVIF of several kinds, cut off, with bits flipped, with other lengths and headers, spliced, and some that
unpack to very many pixels; 64 go in one call, where each has to answer for itself. The messages are requests
of every RPC that the protos tell of, of health and of reflection, changed byte by byte and field by field:
unknown, repeated and endless fields, lengths beyond the end, nesting, texts that are none; and now and then
one of 100 MB.

No answer may be INTERNAL, UNKNOWN or UNAVAILABLE, or be missing at its deadline, whatever was sent; between
the cases a known image must be embedded and found as ever; and the server's memory, without pages of files,
may grow by 10 % at most from the second fifth of the cases to the last. What breaks that is written to --save
with its seed and the number of its group, which `--group` sends again alone.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc.aio

from benchmarks.driving.figures import median
from benchmarks.driving.log import tell
from benchmarks.driving.served import Failed, Served, crossbatch
from benchmarks.fuzzing import pictures
from benchmarks.fuzzing.campaign import AT_ONCE, Campaign, call
from benchmarks.fuzzing.requests import GALLERIES, Method, methods
from protos import gallery_service_pb2 as gallery_pb
from protos import gallery_service_pb2_grpc, model_service_pb2_grpc, retrieval_service_pb2_grpc
from protos import model_service_pb2 as model_pb
from protos import retrieval_service_pb2 as retrieval_pb

__all__ = ["main"]

_KNOWN: Final = "known"
_STEP: Final = 2 * AT_ONCE * 15  # cases between two checks
_OVERSIZED: Final = 10  # checks between two messages of 100 MB
_MOST_GROWTH: Final = 0.10
_PATIENCE: Final = 60.0


class Fuzz:
    """One run against one server."""

    def __init__(self, served: Served, channel: grpc.aio.Channel) -> None:
        self._served = served
        self._channel = channel
        self._retrieval: Any = retrieval_service_pb2_grpc.RetrievalServiceStub(channel)
        self._galleries: Any = gallery_service_pb2_grpc.GalleryServiceStub(channel)
        self._models: Any = model_service_pb2_grpc.ModelServiceStub(channel)
        self._vector = b""
        self.memory: list[int] = []

    async def prepare(self, skip: Sequence[str]) -> tuple[bytes, str, list[Method], list[str]]:
        """Make the galleries; returns a vector, a model's name, and the RPCs that there are and are not."""
        model = (await self._models.GetModel(model_pb.GetModelRequest(), timeout=_PATIENCE)).model
        await self._create(_KNOWN)
        await self._fill(_KNOWN, ["known"])
        await self.tidy()
        request = retrieval_pb.EmbedRequest(images=[pictures.known()])
        self._vector = (await self._retrieval.Embed(request, timeout=_PATIENCE)).results[0].vector
        there: list[Method] = []
        missing: list[Method] = []
        for method in methods():
            if method.name in skip:
                continue
            (there if await self._is_there(method) else missing).append(method)
        return self._vector, model.name, there, [method.path for method in missing]

    async def check(self) -> None:
        """Prove that the server answers as ever, and look at its memory.

        Raises:
            Failed: It does not.
        """
        request = retrieval_pb.EmbedRequest(images=[pictures.known()])
        query = retrieval_pb.Query(image=pictures.known())
        search = retrieval_pb.SearchRequest(gallery=_KNOWN, queries=[query], k=1)
        try:
            embedded = await self._retrieval.Embed(request, timeout=_PATIENCE)
            found = await self._retrieval.Search(search, timeout=_PATIENCE)
        except grpc.aio.AioRpcError as error:
            raise Failed(f"a known image is refused: {error.code().name} {error.details()}") from error
        if embedded.results[0].vector != self._vector:
            raise Failed("a known image has another embedding than before")
        if [hit.key for hit in found.results[0].hits] != ["known"]:
            raise Failed("a known image is not found any more")
        self.memory.append(self._served.own_memory())

    async def tidy(self) -> None:
        """Delete what messages have made, so that nothing grows because it was asked to."""
        listed = await self._galleries.ListGalleries(
            gallery_pb.ListGalleriesRequest(page_size=1000), timeout=_PATIENCE
        )
        for gallery in listed.galleries:
            if gallery.name != _KNOWN:
                await self._drop(gallery.name)
        for name in GALLERIES:
            await self._create(name)
            await self._fill(name, [f"item-{i}" for i in range(5)])

    async def _create(self, name: str) -> None:
        try:
            await self._galleries.CreateGallery(gallery_pb.CreateGalleryRequest(name=name), timeout=_PATIENCE)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise Failed(f"gallery {name}: {error.code().name} {error.details()}") from error

    async def _fill(self, name: str, keys: Sequence[str]) -> None:
        items = [gallery_pb.Item(key=key, image=pictures.known(), label=key) for key in keys]
        for item in items:
            item.metadata["colour"] = item.key
        request = gallery_pb.UpsertItemsRequest(gallery=name, items=items)
        try:
            await self._galleries.UpsertItems(request, timeout=_PATIENCE)
        except grpc.aio.AioRpcError as error:
            raise Failed(f"gallery {name}: {error.code().name} {error.details()}") from error

    async def _drop(self, name: str) -> None:
        try:
            await self._galleries.DeleteGallery(gallery_pb.DeleteGalleryRequest(name=name), timeout=_PATIENCE)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise Failed(f"gallery {name}: {error.code().name} {error.details()}") from error

    async def _is_there(self, method: Method) -> bool:
        """Ask it with a message that is none."""
        code, _, _ = await call(self._channel, method, b"\xff")
        return code != "UNIMPLEMENTED"


async def _run(served: Served, given: argparse.Namespace) -> dict[str, Any]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(served.address, options) as channel:
        fuzz = Fuzz(served, channel)
        vector, model, there, missing = await fuzz.prepare(given.skip)
        print(f"{len(there)} RPCs" + (f"; not implemented: {', '.join(missing)}" if missing else ""))
        campaign = Campaign(given.seed, there, vector, model, given.save)
        if given.group is not None:
            await campaign.send(channel, [given.group])
            return _told(campaign, fuzz, missing, 0.0)
        began = time.perf_counter()
        group = step = 0
        while campaign.cases < given.count:
            groups = range(group, group + _STEP // (2 * AT_ONCE) * (AT_ONCE + 1))
            group = groups.stop
            await campaign.send(channel, groups)
            await fuzz.check()
            await fuzz.tidy()
            step += 1
            if step % _OVERSIZED == 1:
                await campaign.oversized(channel)
            seconds = time.perf_counter() - began
            tell(
                f"{campaign.cases:,} cases, {campaign.cases / seconds:.0f}/s, {fuzz.memory[-1] / 1e6:.0f} MB"
            )
        return _told(campaign, fuzz, missing, campaign.cases / (time.perf_counter() - began))


def _told(campaign: Campaign, fuzz: Fuzz, missing: list[str], rate: float) -> dict[str, Any]:
    """Return all that is known, for a file and for the verdict."""
    fifth = len(fuzz.memory) // 5
    first = median(fuzz.memory[fifth : 2 * fifth] or fuzz.memory[:1])
    last = median(fuzz.memory[-fifth or -1 :])
    return {
        "seed": campaign.seed,
        "cases": campaign.cases,
        "cases_per_second": rate,
        "codes": dict(sorted(campaign.codes.items())),
        "findings": [finding.__dict__ for finding in campaign.findings],
        "not_implemented": missing,
        "memory": fuzz.memory,
        "growth": last / first - 1 if fuzz.memory else 0.0,
    }


def main(words: Sequence[str]) -> int:
    """Fuzz; returns 1 where the server answered as it must not, or broke down."""
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = given.model or _tiny(work / "tiny.onnx")
        log = given.log or work / "server.log"
        with crossbatch(
            model, work / "galleries", log, "--max-in-flight", "4096", "--log-level", "WARNING"
        ) as served:
            try:
                result = asyncio.run(_run(served, given))
            except Failed as error:
                print(f"NOT MET: {error}" + ("" if served.alive else "; the server has ended"))
                return 1
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))
    return _judge(result, given.save)


def _judge(result: dict[str, Any], save: Path) -> int:
    """Print what came of it; returns the exit status."""
    print(f"{result['cases']:,} cases, {result['cases_per_second']:.0f} a second, seed {result['seed']}")
    for code, count in result["codes"].items():
        print(f"  {code}: {count:,}")
    kinds: dict[tuple[str, str, str], int] = {}
    for finding in result["findings"]:
        key = finding["path"], finding["code"], finding["text"][:100]
        kinds[key] = kinds.get(key, 0) + 1
    for (path, code, text), count in sorted(kinds.items()):
        print(f"  found {count:,} times: {path} {code} {text}")
    bad = len(result["findings"])
    print(f"- answers that no input deserves: {bad}: {'met' if not bad else f'NOT MET, see {save}'}")
    steady = result["growth"] <= _MOST_GROWTH
    print(f"- growth of memory: {100 * result['growth']:.1f} %: {'met' if steady else 'NOT MET'}")
    return int(bool(bad) or not steady)


def _tiny(path: Path) -> Path:
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="ONNX file; a model of a few nodes if not given")
    parser.add_argument("--count", type=int, default=100_000, help="least cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=int, help="send this group of the seed alone")
    parser.add_argument("--skip", nargs="*", default=[], help="names of RPCs that get no messages")
    parser.add_argument("--save", type=Path, default=Path("fuzz-findings"), help="folder for what is found")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
