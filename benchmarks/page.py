"""The page before a large gallery: `python benchmarks/page.py [--gallery PATH --model MODEL.onnx]`.

Debian's Chromium opens each view anew, its cache empty, before a server of its own; a gallery of vectors
about class centres is drawn if none is given. Figures are medians of the rounds: "first paint" from the
begin of the navigation to the first text (First Contentful Paint), "grid" from the last byte of the reply
that has the items to the frame that shows them, pictures included where the gallery has thumbnails; for the
map the frames a second while it is dragged. "Items" are the most that one reply held, "KB" what all replies
of a view weighed.

Bounds: first paint 1 s, grid 300 ms, 60 items. The exit status is 1 where one is not met.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from playwright.sync_api import Browser, Page, Response, sync_playwright

from benchmarks.contenders.embeddings import draw
from benchmarks.driving.figures import median, write_csv
from benchmarks.driving.served import Failed, Served
from serving.gallery.gallery import Gallery, RebuildPolicy
from serving.gallery.item import GalleryItem
from serving.gallery.map import make_map
from serving.model.spec import read_spec
from tests.tiny_model import write_tiny_model

__all__ = ["BOUNDS", "VIEWS", "main", "measured", "missed", "served", "table"]

BOUNDS: Final = {"first paint ms": 1000.0, "grid ms": 300.0, "items": 60.0}
PATIENCE: Final = 60_000  # ms
DIMENSION: Final = 128
VIEWS: Final = {
    "search, start": ("search", "/items:sample", "#results .card"),
    "search, by item": ("search", ":search", "#results .card[data-score]"),
    "browse": ("browse", "/items:list", "#browse-items .card"),
    "browse, random": ("browse", "/items:sample", "#browse-items .card"),
    "map": ("map", "/map:tile", "#map-canvas[data-points]:not([data-points='0'])"),
}
# When the last byte of a reply came, and the first frame after its items and their pictures were there.
WATCH: Final = """(() => {
  const [path, cards] = JSON.parse(%s);
  const done = () => {
    const all = [...document.querySelectorAll(cards)];
    const pictures = all.flatMap((each) => [...each.querySelectorAll("img:not([loading=lazy])")]);
    return all.length > 0 && pictures.every((each) => each.complete);
  };
  const look = () => {
    const replies = performance.getEntriesByType("resource").filter((each) => each.responseEnd);
    const end = replies.find((each) => each.name.endsWith(path))?.responseEnd;
    if (end && done()) requestAnimationFrame((time) => { window.grid = Math.max(0, time - end); });
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""
FRAMES: Final = """() => new Promise((resolve) => {
  const from = performance.now();
  let frames = 0;
  const count = (now) => {
    if (now - from > 1000) return resolve(frames * 1000 / (now - from));
    frames++;
    requestAnimationFrame(count);
  };
  requestAnimationFrame(count);
})"""


def measure(browser: Browser, url: str, view: str, gallery: str, key: str) -> dict[str, float]:
    """Open one view in a context of its own."""
    name, path, cards = VIEWS[view]
    fields = {"gallery": gallery, **({"key": key} if path == ":search" else {})}
    if view == "browse, random":
        fields |= {"show": "random", "seed": "3"}
    replies: list[Response] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.add_init_script(WATCH % json.dumps(json.dumps([path, cards])))
    page.on("response", lambda reply: replies.append(reply) if "/v1" in reply.url else None)
    page.goto(f"{url}#/{name}?{urlencode(fields)}")
    page.wait_for_function("() => window.grid !== undefined")
    page.wait_for_load_state("networkidle")
    paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
    row = {"first paint ms": paint, "grid ms": page.evaluate("() => window.grid")}
    bodies = [reply.body() for reply in replies]
    row |= {"items": max(map(held, bodies)), "KB": sum(map(len, bodies)) / 1e3}
    if view == "map":
        row["frames/s"] = dragged(page)
        del row["items"]  # points are no items
    context.close()
    return row


def held(reply: bytes) -> float:
    """How many items a reply has."""
    told = json.loads(reply)
    lists = [told.get("items"), *(each.get("hits") for each in told.get("results", []))]
    return sum(len(each) for each in lists if isinstance(each, list))  # of a count, items is a number


def dragged(page: Page) -> float:
    """Frames a second while the map is dragged about."""
    box = page.locator("#map-canvas").bounding_box()
    assert box
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.evaluate(f"() => {{ window.frames_a_second = ({FRAMES})(); }}")
    for step in range(60):
        page.mouse.move(x + 4 * (step % 20), y + 3 * (step % 15))
    found: float = page.evaluate("() => window.frames_a_second")
    page.mouse.up()
    return found


def write_model(path: Path) -> Path:
    """Write a model that embeds by the mean colour: a key needs none, but the server does."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "weights"], ["mixed"]),
        helper.make_node("LpNormalization", ["mixed"], ["embeddings"], axis=1, p=2),
    ]
    graph = helper.make_graph(
        nodes,
        "colour",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", 8, 8, 3])],
        [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", DIMENSION])],
        [
            numpy_helper.from_array(np.array([1, 2]), "axes"),
            numpy_helper.from_array(np.eye(3, DIMENSION, dtype=np.float32), "weights"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return write_tiny_model(path, model, dimension=DIMENSION, prototypes=0)


def drawn(path: Path, model: Path, count: int) -> None:
    """Make a gallery of a model with small pictures, a map and an index."""
    spec = read_spec(model)
    draw(path.with_suffix(".npy"), count, DIMENSION)
    rows = np.load(path.with_suffix(".npy"), mmap_mode="r")
    policy = RebuildPolicy(automatic=False)
    made_for: dict[str, Any] = {
        "model_name": spec.name,
        "fingerprint": spec.fingerprint,
        "dimension": DIMENSION,
    }
    with closing(Gallery.create(path, policy=policy, thumbnail_side=32, **made_for)) as gallery:
        for start in range(0, count, 1000):
            gallery.upsert(item(number, rows[number]) for number in range(start, min(start + 1000, count)))
        make_map(gallery)
        gallery.rebuild()


def item(number: int, vector: NDArray[np.float32]) -> GalleryItem:
    """An item of one of 97 labels."""
    more: dict[str, Any] = {"label": f"class {number % 97}", "metadata": {"price": number % 1000}}
    return GalleryItem(f"{number:07}", vector, thumbnail=thumbnail(number % 97), **more)


@cache
def thumbnail(number: int) -> bytes:
    """A picture of one colour, JPEG."""
    file = BytesIO()
    Image.new("RGB", (32, 32), (2 * number, 255 - number, 128)).save(file, "JPEG")
    return file.getvalue()


@contextmanager
def served(gallery: Path | None, model: Path | None, count: int) -> Iterator[tuple[str, str]]:
    """Serve a gallery, or one that is drawn; yields the address of the page and the gallery's name."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        path, model = gallery or work / "galleries" / "drawn", model or write_model(work / "colour.onnx")
        if gallery is None:
            path.parent.mkdir()
            drawn(path, model, count)
        words = ["--model", str(model), "--galleries", str(path.parent)]
        command = [sys.executable, "-m", "crossbatch", "serve", *words, "--port", "0", "--web-port", "0"]
        with Served(command, work / "log", ready=r"page on (\S+)") as server:
            yield server.address, path.name


def measured(
    browser: Browser, url: str, gallery: str, rounds: int, views: Iterable[str] = VIEWS
) -> Iterator[dict[str, object]]:
    """Yield a row for each view, of medians; the map is left out where the gallery has none."""
    context = browser.new_context()
    reply = context.request.post(f"{url}v1/galleries/{gallery}/items:sample", data={"size": 1, "seed": 1})
    if not reply.ok:
        raise Failed(reply.text())
    (sample,) = reply.json()["items"]
    context.close()
    for view in views:
        if view == "map" and "map_x" not in sample.get("metadata", {}):
            continue
        rows = [measure(browser, url, view, gallery, sample["key"]) for _ in range(rounds)]
        yield {"view": view, **{name: median([row[name] for row in rows]) for name in rows[0]}}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Write the rows as a table."""
    columns = ["view", *BOUNDS, "KB", "frames/s"]
    cells = [[row.get(column, "") for column in columns] for row in rows]
    lines = [[f"{each:.0f}" if isinstance(each, float) else str(each) for each in line] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *lines])


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell which bounds are not met."""
    return [
        f"{row['view']}: {name} {row[name]:.0f}, at most {most:g}"
        for row in rows
        for name, most in BOUNDS.items()
        if row.get(name, 0) > most
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gallery", type=Path, help="a gallery to look at; by default one is drawn")
    parser.add_argument("--model", type=Path, help="its model file")
    parser.add_argument("--count", type=int, default=1_000_000, help="items of the one that is drawn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="file that the rows are added to")
    given = parser.parse_args(words)
    with served(given.gallery, given.model, given.count) as (url, gallery), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        rows = list(measured(browser, url, gallery, given.rounds))
        browser.close()
    print(table(rows))
    if given.csv:
        write_csv(given.csv, rows)
    for each in missed(rows):
        print(f"missed: {each}")
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
