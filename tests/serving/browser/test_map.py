"""The map: points, pan, zoom, and a lasso that becomes a filter."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.serving.browser.looking import Site, drag, found, state, until
from tests.serving.browser.shop import EDITED, SHOP


def view(page: Page) -> list[float]:
    """The middle of what is seen, and how much it is enlarged."""
    return [float(each) for each in state(page).get("at", "0.5,0.5,1").split(",")]


def drawn(page: Page) -> None:
    expect(page.locator("#map-canvas")).to_have_attribute("data-points", "73")


def test_the_map_is_moved_zoomed_and_shared(site: Site, page: Page) -> None:
    page.goto(site.link("map", gallery=SHOP))
    drawn(page)
    expect(page.locator("#map-legend li")).to_have_count(9)
    drag(page, "#map-canvas", (0.5, 0.5), (0.4, 0.5))
    until(page, lambda now: "at" in now)
    x, y, zoom = view(page)
    assert x > 0.55
    assert (y, zoom) == pytest.approx((0.5, 1), abs=0.01)
    page.mouse.wheel(0, -400)
    until(page, lambda now: float(now["at"].split(",")[2]) > 1.5)
    page.locator("#map-canvas").press("ArrowDown")
    until(page, lambda now: float(now["at"].split(",")[1]) > 0.52)
    page.locator("#map-canvas").press("0")
    until(page, lambda now: now["at"] == "0.5,0.5,1")
    picture = "() => document.getElementById('map-canvas').toDataURL()"
    page.locator("#map-field").select_option("price")
    until(page, lambda now: now["colour"] == "price")
    drawn(page)
    expect(page.locator("#map-legend")).to_contain_text(re.compile("other values"))
    assert page.evaluate(picture)


def test_what_the_lasso_encloses_is_searched(site: Site, page: Page) -> None:
    page.goto(site.link("map", gallery=SHOP))
    drawn(page)
    with site.client() as client:
        places = [item.metadata["map_x"] for item in client.items(SHOP)]
    assert len(places) == 73
    assert all(0 <= each <= 1 for each in places)
    page.get_by_role("button", name="Lasso").click()
    corners = [(0.3, 0.03), (0.5, 0.03), (0.5, 0.97), (0.3, 0.97), (0.3, 0.03)]
    drag(page, "#map-canvas", *corners)
    until(page, lambda now: "filter" in now)
    ((name, operator, boxes),) = json.loads(state(page)["filter"])
    assert (name, operator) == ("map", "within")
    with site.client() as client:
        within = {"$or": [
            {"map_x": {"$gte": left, "$lte": right}, "map_y": {"$gte": top, "$lte": bottom}}
            for left, right, top, bottom in boxes
        ]}  # fmt: skip
        count = client.count(SHOP, filter=within)
        assert 0 < count < 73
        expect(page.locator("main")).to_contain_text(f"{count} items within the outline")
        page.get_by_role("link", name="Search within").click()
        until(page, lambda now: now["view"] == "search")
        page.locator("#results .card").first.locator("button.picture").click()
        query = until(page, lambda now: "key" in now)["key"]
        (hits,) = client.search(SHOP, keys=[query], filter=within, exclude=[query], k=24)
    assert found(page) == [hit.key for hit in hits]
    page.go_back()
    page.go_back()
    until(page, lambda now: now["view"] == "map")
    page.get_by_role("button", name="Clear the outline").click()
    until(page, lambda now: "filter" not in now)


def test_a_point_is_named_and_searched_by(site: Site, page: Page) -> None:
    page.goto(site.link("map", gallery=SHOP))
    drawn(page)
    with site.client() as client:
        item = client.get(SHOP, "05/1.jpg")
    box = page.locator("#map-canvas").bounding_box()
    assert box
    side = min(box["width"], box["height"])
    x = box["width"] / 2 + (item.metadata["map_x"] - 0.5) * side
    y = box["height"] / 2 + (item.metadata["map_y"] - 0.5) * side
    page.mouse.move(box["x"] + x, box["y"] + y)
    expect(page.locator(".bubble img")).to_be_visible()
    expect(page.locator(".bubble")).to_contain_text("05/1.jpg")
    page.mouse.down()
    page.mouse.up()
    until(page, lambda now: now["view"] == "search" and now["key"] == "05/1.jpg")
    assert found(page)


def test_a_gallery_without_a_map_tells_how_to_make_one(site: Site, page: Page) -> None:
    page.goto(site.link("map", gallery=EDITED))
    expect(page.locator("main")).to_contain_text(f"crossbatch gallery map {EDITED}")
