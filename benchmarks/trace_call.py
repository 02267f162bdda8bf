"""How much of our code a call passes: files, function calls and changes of thread, by kind of call.

    python benchmarks/trace_call.py [MODEL.onnx]

Runs a server in this process and asks it through stubs of its own, so that what is counted is the server's
side alone. Each call is made several times first. The threads of the log, of the
metrics and of the file of keys are not counted.
"""

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from protos import gallery_service_pb2 as gallery_pb  # noqa: E402
from protos import gallery_service_pb2_grpc, retrieval_service_pb2_grpc  # noqa: E402
from protos import retrieval_service_pb2 as pb  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402

WARM_UP = 5
IMAGES = 20
"""Images of the data set that is indexed."""


INNER = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""What Python calls as a function and nobody writes as one."""


class Trace:
    """Takes note of each function of ours that is called, while it is on."""

    def __init__(self) -> None:
        self._ours = str(ROOT / "serving")
        self._seen: list[tuple[int, str]] = []
        self._on = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Be called by Python at each call and return, in every thread."""
        code = frame.f_code
        if (
            self._on
            and event == "call"
            and code.co_filename.startswith(self._ours)
            and code.co_name not in INNER
        ):
            self._seen.append((threading.get_ident(), code.co_filename))

    @contextmanager
    def on(self) -> Iterator[dict[str, int]]:
        """Count while the block runs."""
        self._seen = []
        counts: dict[str, int] = {}
        apart = {thread.ident for thread in threading.enumerate() if thread.name in ("metrics", "keys")}
        apart |= {thread.ident for thread in threading.enumerate() if "_monitor" in thread.name}
        self._on = True
        yield counts
        time.sleep(0.05)  # in which a call is seen out after its answer
        self._on = False
        seen = [(thread, file) for thread, file in self._seen if thread not in apart]
        counts["files"] = len({file for _, file in seen})
        counts["calls"] = len(seen)
        counts["thread_changes"] = sum(a[0] != b[0] for a, b in pairwise(seen))


def photo(number: int) -> bytes:
    """Make a small JPEG."""
    pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
    data = BytesIO()
    Image.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


def calls_of(channel: grpc.Channel, dimension: int) -> dict[str, Callable[[], Any]]:
    """The calls that are traced, by name; the gallery `g` has items by then."""
    retrieval = retrieval_service_pb2_grpc.RetrievalServiceStub(channel)
    galleries = gallery_service_pb2_grpc.GalleryServiceStub(channel)
    vector = np.eye(1, dimension, dtype="<f4").tobytes()
    item = gallery_pb.Item(key="k", image=photo(1))
    return {
        "search by photo": lambda: retrieval.Search(
            pb.SearchRequest(gallery="g", queries=[pb.Query(image=photo(0))]), timeout=10
        ),
        "search by vector": lambda: retrieval.Search(
            pb.SearchRequest(gallery="g", queries=[pb.Query(vector=vector)]), timeout=10
        ),
        "embed": lambda: retrieval.Embed(pb.EmbedRequest(images=[photo(0)]), timeout=10),
        "upsert": lambda: galleries.UpsertItems(
            gallery_pb.UpsertItemsRequest(gallery="g", items=[item]), timeout=10
        ),
    }


def trace(model: Path) -> dict[str, dict[str, int]]:
    """Count what each kind of call passes.

    Args:
        model: An exported model.

    Returns:
        By kind of call, `files`, `calls` and `thread_changes`; those of an indexed image are its share.
    """
    from serving.indexing import command as index
    from serving.observability.logs import configure_logs
    from serving.server.server import Server
    from serving.settings import Settings

    traced = Trace()
    threading.setprofile(traced.profile)
    sys.setprofile(traced.profile)
    found = {}
    try:
        with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nobody:
            configure_logs("INFO", nobody)
            root = Path(folder)
            (root / "photos").mkdir()
            for number in range(2 * IMAGES):
                (root / "photos" / f"{number}.jpg").write_bytes(photo(number))
            settings = Settings(model=(str(model),), galleries=root / "galleries", port=0, max_batch=8)
            wanted = index.Settings(
                gallery=str(root / "galleries" / "g"), model=model, data=root / "photos", split="all"
            )
            with traced.on() as counts:
                index.run(wanted)
            # The share of one image, beside what each run takes.
            found["indexed image"] = {"files": counts["files"], "calls": counts["calls"] // (2 * IMAGES)}
            server = Server(settings)
            server.start()
            with grpc.insecure_channel(server.address) as channel:
                for name, call in calls_of(channel, server.models.get().spec.dimension).items():
                    for _ in range(WARM_UP):
                        call()
                    with traced.on() as counts:
                        call()
                    found[name] = counts
            server.stop(1.0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def main() -> None:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="ONNX file; a model of a few nodes if not given")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        found = trace(given.model or write_tiny_model(Path(folder) / "tiny.onnx"))
    if given.json:
        print(json.dumps(found))
        return
    print(f"{'':18}{'files':>7}{'calls':>7}{'thread changes':>16}")
    for name, counts in found.items():
        print(f"{name:18}{counts['files']:7}{counts['calls']:7}{counts.get('thread_changes', ''):>16}")


if __name__ == "__main__":
    main()
