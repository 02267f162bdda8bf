"""Each view by the rules of axe-core, and at the width of a phone: light and dark."""

import json
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.serving.browser.looking import Site, card, found, keys
from tests.serving.browser.shop import EDITED, OTHER, SHOP

QUERY = "03/2.jpg"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def serious(page: Page) -> list[str]:
    """The serious and critical violations, each with its elements."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {[node['target'] for node in each['nodes']][:5]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def start(page: Page) -> None:
    keys(page)


def results(page: Page) -> None:
    found(page)
    page.locator("#code-panel summary").click()


def why(page: Page) -> None:
    found(page)
    card(page, "03/3.jpg").locator("button.picture").focus()
    page.keyboard.press("e")
    expect(page.locator("#explain-dialog .shared button").first).to_be_visible()


def edit(page: Page) -> None:
    keys(page, "#browse-items")
    card(page, "00/1.jpg").locator("button.picture").focus()
    page.keyboard.press("e")
    expect(page.locator("#edit-dialog")).to_be_visible()


def browse(page: Page) -> None:
    keys(page, "#browse-items")
    for fold in page.locator("#field-list summary").all()[:2]:
        fold.click()


def points(page: Page) -> None:
    expect(page.locator("#map-canvas")).to_have_attribute("data-points", "73")
    expect(page.locator("#map-legend li")).to_have_count(9)


def compare(page: Page) -> None:
    keys(page, "#compare-right")
    expect(page.locator("#compare-table")).to_be_visible()


def marked(page: Page) -> None:
    rows = [[QUERY, "03/3.jpg", 1], [QUERY, "04/3.jpg", 0]]
    page.evaluate(
        "([gallery, rows]) => localStorage.setItem(`crossbatch-marks-${gallery}`, rows)",
        [SHOP, json.dumps(rows)],
    )
    page.reload()
    page.locator("#marks-table summary").click()


def keyboard(page: Page) -> None:
    found(page)
    page.keyboard.press("?")


MIX = '[{"key":"03/2.jpg","weight":1},{"key":"00/1.jpg","weight":-1}]'
SEEN: dict[str, tuple[str, dict[str, Any], Any]] = {
    "start": ("search", {}, start),
    "results": ("search", {"key": QUERY, "k": 6, "filter": '[["sold","is",true]]'}, results),
    "several": ("search", {"mix": MIX, "k": 6}, results),
    "why": ("search", {"key": QUERY}, why),
    "keyboard": ("search", {"key": QUERY, "k": 3}, keyboard),
    "browse": ("browse", {"filter": '[["price","most",5]]'}, browse),
    "duplicates": ("browse", {"show": "duplicates", "above": 0.999}, lambda page: keys(page, "#duplicates")),
    "edit": ("browse", {"gallery": EDITED}, edit),
    "map": ("map", {}, points),
    "compare": ("compare", {"other": OTHER, "k": 4, "key": QUERY, "list": '["random",5,1]'}, compare),
    "marks": ("marks", {}, marked),
    "error": ("search", {"gallery": "nowhere"}, lambda page: expect(page.locator(".notice")).to_be_visible()),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_view_has_no_serious_fault_and_fits_a_phone(site: Site, page: Page, name: str) -> None:
    view, fields, ready = SEEN[name]
    page.goto(site.link(view, **{"gallery": SHOP} | fields))
    ready(page)
    faults = {}
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if told := serious(page):
                faults[size["width"], scheme] = told
    assert faults == {}
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= PHONE["width"]


def test_faults_for_the_eye_are_seen(site: Site, page: Page) -> None:
    page.goto(site.link("marks", gallery=SHOP))
    expect(page.locator(".notice")).to_be_visible()
    page.evaluate("""() => {
        const pale = Object.assign(document.createElement("p"), {textContent: "pale"});
        pale.style.color = "#bbb";
        document.querySelector("main").append(pale, document.createElement("input"));
    }""")
    told = "\n".join(serious(page))
    assert "color-contrast (serious)" in told
    assert "label (critical)" in told
