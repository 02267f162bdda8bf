"""What the page works out by itself, in Chromium: CSV, marks, agreement of rankings, lassos and edits."""

import csv
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, Route

import serving

STATIC = Path(serving.__file__).parent / "web" / "static"
KINDS = {".js": "text/javascript", ".html": "text/html"}
HOSTILE = ["a,b", 'say "x"', "two\nlines", "=1+2", "@x", " lead", "", "ü/é", "__proto__", "-3", "a\r\nb"]


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Page]:
    """An empty page of an origin that has the modules, and no server behind it."""

    def answer(route: Route) -> None:
        path = STATIC / Path(route.request.url).name
        body = path.read_text(encoding="utf-8") if path.suffix == ".js" else "<!doctype html><p id=live></p>"
        route.fulfill(body=body, content_type=KINDS.get(path.suffix, "text/html"))

    page = chromium.new_page()
    page.route("**/*", answer)
    page.goto("http://modules.test/")
    yield page
    page.close()


def run(page: Page, module: str, expression: str, given: Any = None) -> Any:
    """Evaluate an expression of the module `m` and what is `given`."""
    return page.evaluate(f"given => import('/static/{module}.js').then(m => ({expression}))", given)


def rank_biased_overlap(a: list[str], b: list[str], p: float) -> float:
    """Equation 30 of Webber, Moffat and Zobel (2010), term by term."""
    k = max(len(a), len(b))
    shared = [len(set(a[:d]) & set(b[:d])) for d in range(1, k + 1)]
    return shared[-1] / k * p**k + (1 - p) / p * sum(x / d * p**d for d, x in enumerate(shared, start=1))


def test_rank_biased_overlap_is_that_of_its_paper(page: Page) -> None:
    draw = random.Random(3)
    names = [f"k{number}" for number in range(15)]
    pairs = [[draw.sample(names, draw.randint(1, 12)) for _ in "ab"] for _ in range(200)]
    found = run(page, "compare", "given.map(([a, b]) => m.rankBiasedOverlap(a, b))", pairs)
    assert found == pytest.approx([rank_biased_overlap(a, b, 0.9) for a, b in pairs])


def test_agreement_of_like_and_unlike_rankings(page: Page) -> None:
    pairs = [
        [["a", "b"], ["a", "b"]],
        [["a", "b"], ["c", "d"]],
        [["a", "b"], ["b", "a"]],
        [["a"], ["a", "b"]],
        [[], []],
    ]
    assert run(page, "compare", "given.map(([a, b]) => m.overlap(a, b))", pairs) == [1, 0, 1, 0.5, 1]
    found = run(page, "compare", "given.map(([a, b]) => m.rankBiasedOverlap(a, b))", pairs)
    assert found == pytest.approx([1, 0, 0.9, 0.5 * 0.81 + (0.1 / 0.9) * (0.9 + 0.5 * 0.81), 1])


def inside(polygon: list[list[float]], x: float, y: float) -> bool:
    """Count the sides that a ray to the right crosses."""
    crossings = 0
    for (ax, ay), (bx, by) in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        crossings += (ay > y) != (by > y) and x < ax + (y - ay) * (bx - ax) / (by - ay)
    return crossings % 2 == 1


@pytest.mark.parametrize(
    "polygon",
    [
        pytest.param([[0.2, 0.2], [0.8, 0.2], [0.8, 0.8], [0.2, 0.8]], id="square"),
        pytest.param([[0.1, 0.9], [0.5, 0.1], [0.9, 0.9]], id="triangle"),
        pytest.param([[0, 0], [0.3, 0], [0.3, 0.7], [0.7, 0.7], [0.7, 0], [1, 0], [1, 1], [0, 1]], id="u"),
        pytest.param([[0.1, 0.1], [0.9, 0.9], [0.9, 0.1], [0.1, 0.9]], id="crosses itself"),
    ],
)  # fmt: skip
def test_a_lasso_becomes_few_boxes_that_cover_it(page: Page, polygon: list[list[float]]) -> None:
    boxes = run(page, "map", "m.strips(given)", polygon)
    assert 1 <= len(boxes) <= 24
    draw = random.Random(5)
    points = [(draw.random(), draw.random()) for _ in range(4000)]
    covered = [
        any(left <= x <= right and top <= y <= bottom for left, right, top, bottom in boxes)
        for x, y in points
    ]
    agree = sum(inside(polygon, *point) == box for point, box in zip(points, covered, strict=True))
    assert agree / len(points) > 0.97


def test_a_lasso_that_crosses_itself_too_often_becomes_the_box_around_it(page: Page) -> None:
    comb = [[x / 100, 0.2 if x % 2 else 0.8] for x in range(10, 90)]
    assert run(page, "map", "m.strips(given, 8)", comb) == [[0.1, 0.89, 0.2, 0.8]]


def test_csv_is_that_of_other_readers(page: Page) -> None:
    draw = random.Random(7)
    rows = [[draw.choice(HOSTILE) + "x", draw.choice(HOSTILE), draw.choice(HOSTILE)] for _ in range(100)]
    written = run(page, "csv", "m.toCsv(given)", rows)
    assert list(csv.reader(io.StringIO(written, newline=""))) == rows
    assert run(page, "csv", "m.risky(given)", [["=1", "a"], ["-2", "b@"], ["\tx", "+"]]) == 4


def test_marks_are_kept_by_gallery(page: Page) -> None:
    page.evaluate("localStorage.clear()")
    for result, relevant in (("b", 1), ("c", 0), ("b", 0), ("__proto__", 1), ("c", None)):
        run(page, "marks", "m.mark('shoes', 'a', ...given)", [result, relevant])
    assert run(page, "marks", "m.marks('shoes')") == [["a", "b", 0], ["a", "__proto__", 1]]
    assert run(page, "marks", "m.marks('hats')") == []


def test_an_edit_sends_what_changed_alone(page: Page) -> None:
    before = {"colour": "red", "price": 4, "tags": ["a"], "sold": False, "gone": "x"}
    after = {"colour": "red", "price": 5, "tags": ["a", "b"], "sold": False, "new": True}
    found = run(page, "edit", "m.difference(...given)", [before, after])
    assert found == {"price": 5, "tags": ["a", "b"], "new": True, "gone": None}
    assert run(page, "edit", "m.difference(...given)", [before, before]) == {}


def test_typed_fields_are_read_or_refused(page: Page) -> None:
    good = [
        ["text", " 7 "],
        ["number", "-2.5e3"],
        ["yes or no", "yes"],
        ["list", '["a", 1]'],
        ["object", '{"a": 1}'],
    ]
    assert run(page, "edit", "given.map(each => m.parsed(...each, 'f'))", good) == [
        " 7 ",
        -2500,
        True,
        ["a", 1],
        {"a": 1},
    ]
    for kind, text in (
        ("number", ""),
        ("number", "1e16"),
        ("number", "x"),
        ("list", "a"),
        ("list", "{}"),
        ("object", "[]"),
    ):
        with pytest.raises(Error, match="price: "):
            run(page, "edit", "m.parsed(...given, 'price')", [kind, text])
