"""Search: photos, regions, several pictures as one query, filters, explanations, and code."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import sklearn.datasets
from PIL import Image
from playwright.sync_api import Page, expect

from tests.serving.browser.looking import Site, Watch, card, drag, drop, found, keys, paste, state, until
from tests.serving.browser.shop import LOCATIONS, OTHER, SHOP, drawn
from tests.serving.processes import ROOT

QUERY = "03/2.jpg"


@pytest.fixture(scope="package")
def photo() -> Path:
    """A photograph of a temple in China."""
    return Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A picture of two products side by side, of which the right one is 05/4.jpg."""
    sides = [Image.open(io.BytesIO(drawn(*each))) for each in ((9, 1), (5, 4))]
    whole = Image.new("RGB", (144, 72))
    for at, each in enumerate(sides):
        whole.paste(each, (72 * at, 0))
    whole.save(tmp_path / "two.png")
    return tmp_path / "two.png"


def scores(page: Page) -> list[float]:
    given = page.locator("#results .card:visible").evaluate_all(
        "all => all.map((each) => each.dataset.score)"
    )
    return [float(each) for each in given]


def test_a_photo_that_is_dropped_finds_its_neighbours(site: Site, page: Page, photo: Path) -> None:
    page.goto(site.link("search", gallery=SHOP))
    expect(page.locator("#results .card")).to_have_count(24)
    drop(page, photo)
    with site.client() as client:
        (hits,) = client.search(SHOP, images=[photo], k=24)
    assert found(page) == [hit.key for hit in hits]
    assert scores(page) == pytest.approx([hit.score for hit in hits], abs=1e-6)
    first = page.locator("#results .card").first
    expect(first).to_contain_text(f"{hits[0].score:.3f}")
    expect(first).to_contain_text(hits[0].label)
    expect(first).to_contain_text(str(hits[0].metadata["colour"]))
    expect(first.locator("img")).to_have_js_property("naturalWidth", 72)
    expect(page.locator("#seen-canvas")).to_have_js_property("width", 32)
    expect(page.locator("#timings")).to_contain_text(re.compile(r"decode \d+\.\d ms.*total \d+\.\d ms"))
    assert state(page)["photo"] == "1"


def test_a_photo_can_be_pasted_and_chosen(site: Site, page: Page, photo: Path, two: Path) -> None:
    page.goto(site.link("search", gallery=SHOP))
    keys(page)
    paste(page, photo)
    pasted = found(page)
    page.locator("#photo-input").set_input_files(two)
    until(page, lambda now: now["photo"] == "2")
    chosen = found(page)
    page.locator("#photo-input").set_input_files(photo)
    until(page, lambda now: now["photo"] == "3")
    assert found(page) == pasted != chosen


def test_a_phone_takes_a_photo(site: Site, watch: Watch, photo: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    page = watch.visit(site.link("search", gallery=SHOP), **phone)
    keys(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Take a photo").tap()
    expect(page.locator("#camera-input")).to_have_attribute("capture", "environment")
    chooser.value.set_files(photo)
    assert len(found(page)) == 24


def test_what_is_no_picture_is_told(site: Site, page: Page, watch: Watch, tmp_path: Path) -> None:
    page.goto(site.link("search", gallery=SHOP))
    keys(page)
    (tmp_path / "notes.txt").write_text("no picture")
    drop(page, tmp_path / "notes.txt", "text/plain")
    expect(page.locator("#toast")).to_contain_text("notes.txt is no picture. Take a JPEG, PNG")
    watch.expect("status of 400")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff no more")
    drop(page, tmp_path / "broken.jpg")
    expect(page.locator("main")).to_contain_text("This picture cannot be read")


def test_a_region_is_dragged_out_and_searched_with(site: Site, page: Page, two: Path) -> None:
    page.goto(site.link("search", gallery=SHOP))
    keys(page)
    drop(page, two, "image/png")
    whole = found(page)
    assert whole[0] != "05/4.jpg"
    drag(page, "#crop-canvas", (0.505, 0.005), (0.7, 0.5), (0.998, 0.99))
    until(page, lambda now: "crop" in now)
    part = found(page)
    assert part[0] == "05/4.jpg"
    assert scores(page)[0] > 0.97
    page.locator("#crop-canvas").press("Escape")
    until(page, lambda now: "crop" not in now)
    assert found(page) == whole
    page.go_back()
    until(page, lambda now: "crop" in now)
    assert found(page) == part
    for _ in range(2):
        page.locator("#crop-canvas").press("Shift+ArrowLeft")
    page.locator("#crop-canvas").press("Enter")
    until(page, lambda now: now["crop"].endswith("0.983") or float(now["crop"].split(",")[2]) < 0.45)
    assert found(page)


def test_a_match_is_explained(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    found(page)
    hit = card(page, "03/3.jpg")
    hit.locator("button.picture").focus()
    page.keyboard.press("e")
    dialog = page.locator("#explain-dialog")
    rows = dialog.locator(".shared button")
    expect(rows.first).to_be_visible()
    expect(dialog.locator("canvas")).to_have_count(2)
    with site.client() as client:
        thumbnails = [client.get(SHOP, key, thumbnail=True).thumbnail for key in (QUERY, "03/3.jpg")]
        query, result = client.explain(thumbnails, model="layout")
    least = np.minimum(query.histogram, result.histogram)
    expected = dict(enumerate(least / least.sum()))
    listed = {
        int(number): float(share)
        for number, share in rows.evaluate_all(
            "all => all.map(({dataset, lastChild}) => [dataset.prototype, parseFloat(lastChild.textContent)])"
        )
    }
    assert listed == pytest.approx(
        {number: 100 * share for number, share in expected.items() if number in listed}, abs=0.051
    )
    assert len(listed) >= 3
    assert sum(listed.values()) > 90
    assert sorted(listed, key=lambda each: -listed[each]) == list(listed)
    maps = "() => [...document.querySelectorAll('#explain-dialog canvas')].map((each) => each.toDataURL())"
    before = page.evaluate(maps)
    rows.first.hover()
    expect(rows.first).to_have_class(re.compile("lit"))
    lit = page.evaluate(maps)
    assert all(one != other for one, other in zip(before, lit, strict=True))
    rows.nth(1).hover()
    expect(rows.nth(1)).to_have_class(re.compile("lit"))
    assert page.evaluate(maps) != lit
    number = next(iter(listed))
    row, column = np.argwhere(query.assignments == number)[0]
    box = dialog.locator("canvas").first.bounding_box()
    assert box
    cell = box["width"] / LOCATIONS
    dialog.locator("canvas").first.hover(position={"x": (column + 0.5) * cell, "y": (row + 0.5) * cell})
    expect(dialog.locator(".lit")).to_have_attribute("data-prototype", str(number))
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_a_model_without_prototypes_gives_no_explanation_and_says_so(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery=OTHER, key=QUERY))
    found(page)
    page.locator("#results .card").first.hover()
    page.locator("#results .card").first.locator("[data-action=why]").click()
    expect(page.locator("#explain-dialog")).to_contain_text("This model has no learnt prototypes")


def test_filters_are_suggested_and_held(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    found(page)
    page.locator("#filter-field").select_option("colour")
    page.locator("#filter-value").focus()
    expect(page.locator("#filter-hint")).to_have_text(re.compile(r"\d+ values"))
    suggested = page.locator("#filter-values option").evaluate_all("all => all.map((each) => each.value)")
    with site.client() as client:
        colours = {item.metadata["colour"] for item in client.items(SHOP) if "colour" in item.metadata}
        chosen = suggested[-1]
        assert set(suggested) == colours
        page.locator("#filter-value").fill(chosen)
        page.locator("#filter-add").click()
        until(page, lambda now: "filter" in now)
        (hits,) = client.search(SHOP, keys=[QUERY], k=24, filter={"colour": chosen}, exclude=[QUERY])
        assert found(page) == [hit.key for hit in hits]
        page.locator("#filter-field").select_option("price")
        page.locator("#filter-operator").select_option("least")
        page.locator("#filter-value").fill(str(hits[1].metadata["price"]))
        page.keyboard.press("Enter")
        until(page, lambda now: "price" in now["filter"])
        narrow = {"$and": [{"colour": chosen}, {"price": {"$gte": hits[1].metadata["price"]}}]}
        (hits,) = client.search(SHOP, keys=[QUERY], k=24, filter=narrow, exclude=[QUERY])
        assert found(page) == [hit.key for hit in hits]
    for name in ("price", "colour"):
        page.get_by_role("button", name=re.compile(f"^Remove: {name}")).click()
    until(page, lambda now: "filter" not in now)
    assert len(found(page)) == 24


def test_results_by_label_and_score(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    labels = "all => all.map((each) => each.item.label)"
    cards = page.locator("#results .card:visible")
    every = found(page)
    of = dict(zip(every, cards.evaluate_all(labels), strict=True))
    mine = of["03/3.jpg"]
    page.get_by_label("One result of each label").check()
    until(page, lambda now: "group" in now)
    found(page)
    each = cards.evaluate_all(labels)
    assert len(set(each)) == len(each) > 4
    page.get_by_label("One result of each label").uncheck()
    page.get_by_label("Another product").check()
    until(page, lambda now: "other" in now and "group" not in now)
    found(page)
    assert mine not in cards.evaluate_all(labels)
    page.get_by_label("Another product").uncheck()
    until(page, lambda now: "other" not in now)
    assert found(page) == every
    middle = sorted(scores(page))[12]
    page.locator("#least-score").fill(f"{middle:.2f}")
    until(page, lambda now: "least" in now)
    found(page)
    least = float(state(page)["least"])
    assert 0 < len(scores(page)) < 24
    assert min(scores(page)) >= least
    page.locator("#k-input").fill("5")
    page.locator("#k-input").press("Enter")
    until(page, lambda now: now.get("k") == "5")
    assert found(page) == every[:5]


def mean(site: Site, weights: dict[str, float]) -> list[str]:
    with site.client() as client:
        total = sum(weight * np.asarray(client.get(SHOP, key).vector) for key, weight in weights.items())
        (hits,) = client.search(SHOP, vectors=[total / np.linalg.norm(total)], exclude=list(weights), k=24)
    return [hit.key for hit in hits]


def test_several_pictures_are_one_query(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    assert found(page)
    card(page, "03/0.jpg").locator("button.picture").focus()
    page.keyboard.press("l")
    until(page, lambda now: "mix" in now)
    both = found(page)
    assert both == mean(site, {QUERY: 1, "03/0.jpg": 1})
    key = both[9]
    parts = page.locator(".part")
    expect(parts).to_have_count(2)
    card(page, key).locator("button.picture").focus()
    page.keyboard.press("n")
    expect(parts).to_have_count(3)
    assert found(page) == mean(site, {QUERY: 1, "03/0.jpg": 1, key: -1})
    page.get_by_role("button", name=f"More of {QUERY}").click()
    expect(parts.first).to_contain_text("×2")
    assert found(page) == mean(site, {QUERY: 2, "03/0.jpg": 1, key: -1})
    page.get_by_role("button", name=f"Remove {key}").click()
    page.get_by_role("button", name="Remove 03/0.jpg").click()
    expect(parts).to_have_count(1)


def code(site: Site, page: Page, form: str) -> str:
    """The query as the page writes it, for the port that this server has."""
    if page.locator("#code-panel").get_attribute("open") is None:
        page.locator("#code-panel summary").click()
    page.locator(f"[data-form={form}]").click()
    text = page.locator("#code-text").text_content() or ""
    return text.replace("127.0.0.1:50051", site.address)


@pytest.mark.parametrize("query", ["key", "mix", "photo", "filter"])
def test_the_query_as_code_finds_the_same(site: Site, page: Page, query: str, two: Path) -> None:
    mixed = [{"key": "03/0.jpg", "weight": 1}, {"key": QUERY, "weight": -1}]
    queries: dict[str, dict[str, Any]] = {
        "key": {"key": QUERY, "k": 7},
        "mix": {"mix": json.dumps(mixed), "group": 1},
        "photo": {"k": 9},
        "filter": {"key": QUERY, "filter": json.dumps([["sold", "is", True], ["price", "most", 60]])},
    }
    page.goto(site.link("search", gallery=SHOP, **queries[query]))
    keys(page)
    if query == "photo":
        drop(page, two, "image/png")
    shown = found(page)
    python = subprocess.run(
        [sys.executable, "-c", code(site, page, "Python")], capture_output=True, text=True, cwd=two.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert python.stderr == ""
    assert [line.split("  ")[-1] for line in python.stdout.splitlines()] == shown
    assert urlsplit(site.url).netloc in code(site, page, "curl")
    curl = subprocess.run(
        ["bash", "-c", code(site, page, "curl")], capture_output=True, text=True, cwd=two.parent, check=False
    )
    assert [hit["key"] for hit in json.loads(curl.stdout)["results"][0]["hits"]] == shown
