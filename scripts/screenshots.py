"""Takes the pictures of docs/page.md: `python scripts/screenshots.py [runs/demo]`, after `crossbatch demo`.

Beside the demo's gallery stands one by a second model, trained with XML on the same products (a minute).
Needs Debian's chromium, and Playwright of the extra `dev`.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "figures" / "page"
GALLERY, OTHER = "products", "with-xml"
WIDTHS = {"desktop": (1280, 860), "phone": (390, 844)}
MOST_BYTES = 300_000


def search(page: Page, demo: Path) -> None:
    """Search with the demo's new picture."""
    page.locator("#results .card").first.wait_for()
    page.locator("#photo-input").set_input_files(demo / "query.jpg")
    page.locator("#found").wait_for()


def explain(page: Page, demo: Path) -> None:
    """Ask why the first result matches."""
    search(page, demo)
    page.locator("#results button.picture").first.focus()
    page.keyboard.press("e")
    page.locator("#explain-dialog .shared button").first.wait_for()


def browse(page: Page, _: Path) -> None:
    """Look at what there is."""
    page.locator("#browse-items .card").first.wait_for()


def points(page: Page, _: Path) -> None:
    """Look at the map."""
    page.locator("#map-canvas[data-points]:not([data-points='0'])").wait_for()
    page.locator("#map-legend li").first.wait_for()


def compare(page: Page, demo: Path) -> None:
    """Search both galleries with the demo's new picture."""
    page.locator("main input[type=file]").set_input_files(demo / "query.jpg")
    page.locator("#compare-right .card").first.wait_for()


VIEWS: dict[str, tuple[str, dict[str, str], Callable[[Page, Path], None]]] = {
    "search": ("search", {}, search),
    "explain": ("search", {}, explain),
    "browse": ("browse", {"show": "random", "seed": "7"}, browse),
    "map": ("map", {}, points),
    "compare": ("compare", {"other": OTHER}, compare),
}


def crossbatch(*words: str | Path) -> None:
    """Run a command; its output is not wanted."""
    command = [sys.executable, "-m", "crossbatch", *map(str, words), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


@contextmanager
def served(demo: Path) -> Iterator[str]:
    """Make both galleries with thumbnails and maps, and serve them; yields the address of the page."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        models, galleries = work / "models", work / "galleries"
        models.mkdir()
        shutil.copy(demo / "model.onnx", models / "demo.onnx")
        crossbatch(
            "train", "demo", "--data", demo / "pictures", "--out", work / "run", "--set", "xml_weight=0.01"
        )
        crossbatch("export", work / "run", models / f"{OTHER}.onnx", "--data", demo / "pictures")
        for gallery, model in ((GALLERY, "demo"), (OTHER, OTHER)):
            words = ["--data", demo / "pictures", "--split", "test", "--thumbnails", "--map", "pca"]
            crossbatch("index", "--model", models / f"{model}.onnx", *words, galleries / gallery)
        command = [sys.executable, "-m", "crossbatch", "serve", "--model", models, "--galleries", galleries]
        command += ["--port", "0", "--web-port", "0"]
        with subprocess.Popen(map(str, command), stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
            try:
                told = (re.search(r"page on (\S+)", line) for line in server.stdout or ())
                yield next(found[1] for found in told if found)
            finally:
                server.terminate()


def take(browser: Browser, url: str, demo: Path, view: str, width: str, scheme: str) -> bytes:
    """Take one picture, as a PNG; of 256 colours where it would be too large."""
    path, fields, ready = VIEWS[view]
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    more = {"has_touch": True, "is_mobile": True, "device_scale_factor": 1.5} if width == "phone" else {}
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", **more)
    page = context.new_page()
    page.goto(f"{url}#/{path}?{urlencode({'gallery': GALLERY, **fields})}")
    ready(page, demo)
    page.wait_for_load_state("networkidle")
    page.wait_for_function(
        "() => !document.querySelector('[aria-busy=true]')"
        " && [...document.images].every((each) => each.complete"
        " || each.getBoundingClientRect().top > innerHeight)"  # it is loaded when it comes into sight
    )
    dialog = page.locator("dialog[open]")  # alone, where there is one: its colours are to be exact
    shot = dialog.screenshot() if width == "desktop" and dialog.count() else page.screenshot()
    whole = Image.open(BytesIO(shot)).convert("RGB")
    context.close()
    full, few = BytesIO(), BytesIO()
    whole.save(full, "PNG", optimize=True)
    whole.quantize(256, dither=Image.Dither.NONE).save(few, "PNG", optimize=True)
    return full.getvalue() if full.tell() <= MOST_BYTES else few.getvalue()


def main() -> int:
    """Take all of them."""
    demo = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo").absolute()
    if not (demo / "model.onnx").is_file():
        print(f"{demo} holds no demo; make it by `crossbatch demo --out {demo} --no-page`.")
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    with served(demo) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for view in VIEWS:
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    data = take(browser, url, demo, view, width, scheme)
                    if len(data) > MOST_BYTES:
                        print(f"{view}, {width}, {scheme}: {len(data):,} bytes, more than {MOST_BYTES:,}")
                        return 1
                    (OUT / f"{view}-{width}-{scheme}.png").write_bytes(data)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
