"""What holds in all views: links, history, keys, API keys, a server that is away, and hostile names."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from serving.rpc.keys import add_key
from tests.serving.browser.conftest import served
from tests.serving.browser.looking import Site, Watch, card, found, keys, state, until
from tests.serving.browser.shop import EDITED, HOSTILE, MARKUP, NAMES, RIGHT_TO_LEFT, SHOP

QUERY = "03/2.jpg"


def test_a_link_shows_another_person_the_same(site: Site, page: Page, watch: Watch) -> None:
    page.goto(site.url)
    expect(page).to_have_title(re.compile("^Search · "))
    page.locator("#gallery-select").select_option(SHOP)
    until(page, lambda now: now["gallery"] == SHOP)
    card(page, keys(page)[3]).locator("button.picture").click()
    query = until(page, lambda now: "key" in now)["key"]
    found(page)
    page.locator("#least-score").fill("0.1")
    page.locator("#filter-field").select_option("sold")
    page.locator("#filter-value").fill("true")
    page.keyboard.press("Enter")
    until(page, lambda now: {"key", "least", "filter"} <= now.keys())
    shown = found(page)
    other = watch.visit(page.url)
    assert found(other) == shown
    assert state(other) == state(page)
    expect(other).to_have_title(f"Search · {SHOP} · crossbatch")
    expect(other.locator(".chips li")).to_contain_text(["sold is true"])
    for lost in ("filter", "least", "key"):
        page.go_back()
        until(page, lambda now, lost=lost: lost not in now)  # type: ignore[misc]
    assert query not in state(page).values()
    for _ in range(3):
        page.go_forward()
    until(page, lambda now: "filter" in now)
    assert found(page) == shown


def test_keys_are_listed_and_do_what_they_say(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    found(page)
    page.keyboard.press("?")
    listed = page.locator("#keys-dialog")
    expect(listed).to_be_visible()
    for text in ("more like this", "mark the result as right", "why it matches", "from picture to picture"):
        expect(listed).to_contain_text(text)
    page.keyboard.press("Escape")
    expect(listed).to_be_hidden()
    wide = "() => document.querySelector('.card').getBoundingClientRect().width"
    before = page.evaluate(wide)
    for _ in range(4):
        page.keyboard.press("+")
    assert page.evaluate(wide) > before
    page.keyboard.press("/")
    expect(page.locator("#filter-value")).to_be_focused()
    page.locator("#results button.picture").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    until(page, lambda now: now["key"] != QUERY)
    found(page)
    page.locator("#results button.picture").first.focus()
    for key, view in (("2", "browse"), ("3", "map"), ("4", "compare"), ("5", "marks"), ("1", "search")):
        page.keyboard.press(key)
        until(page, lambda now, view=view: now["view"] == view)  # type: ignore[misc]


def test_what_is_not_there_is_told(site: Site, page: Page) -> None:
    page.goto(site.link("search", gallery="nowhere"))
    expect(page.locator("main")).to_contain_text("There is no gallery “nowhere”")
    page.get_by_role("link", name=SHOP).click()
    until(page, lambda now: now["gallery"] == SHOP)
    keys(page)


def test_an_empty_server_tells_how_to_make_a_gallery(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with served(folder / "models", tmp_path / "none") as (_, site):
        watch = Watch(chromium, {site.url})
        page = watch.visit(site.url)
        expect(page.locator("main")).to_contain_text("There is no gallery yet")
        expect(page.locator("main")).to_contain_text("crossbatch index --model MODEL.onnx --data FOLDER")
        watch.close()
        assert watch.unmeant() == []


def test_keys_are_asked_for_and_a_server_that_is_gone_is_told(
    chromium: Browser, site: Site, folder: Path, tmp_path: Path
) -> None:
    secrets = {role: add_key(tmp_path / "keys.json", role, role) for role in ("read", "write")}
    words = ("--keys", str(tmp_path / "keys.json"))
    with served(folder / "models", folder / "galleries", *words) as (server, locked):
        watch = Watch(chromium, {locked.url})
        watch.expect("status of 40[13]")
        page = watch.visit(locked.link("browse", gallery=EDITED))
        dialog = page.locator("#key-dialog")
        for key in ("nonsense", secrets["read"]):
            expect(dialog.locator("input")).to_have_value("")
            dialog.locator("input").fill(key)
            dialog.get_by_role("button", name="Use this key").click()
        keys(page, "#browse-items")
        expect(dialog).to_have_count(0)
        card(page, "00/4.jpg").locator("button.picture").focus()
        page.keyboard.press("e")
        page.locator("#edit-label").fill("not allowed")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#edit-dialog [role=alert]")).to_have_text(
            "The API key of this tab may read items, but not change them: "
            "that needs a key with the role write."
        )
        with site.client() as client:
            assert client.get(EDITED, "00/4.jpg").label != "not allowed"
        page.get_by_role("button", name="Cancel").click()

        writer = watch.visit(locked.link("browse", gallery=EDITED))
        writer.locator("#key-dialog input").fill(secrets["write"])
        writer.keyboard.press("Enter")
        keys(writer, "#browse-items")
        card(writer, "00/4.jpg").locator("button.picture").focus()
        writer.keyboard.press("e")
        writer.locator("#edit-label").fill("allowed")
        writer.get_by_role("button", name="Save").click()
        expect(card(writer, "00/4.jpg")).to_contain_text("allowed")
        assert secrets["write"] not in writer.url + writer.content()

        server.process.kill()
        server.process.wait()
        watch.expect("ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET")
        page.get_by_role("button", name="Random").click()
        expect(page.locator("main [role=alert]")).to_contain_text("The server does not answer")
        expect(page.locator("main [role=alert]")).to_contain_text("still runs, then try again")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        watch.close()
        assert watch.unmeant() == []


def made_of(page: Page) -> int:
    """How many elements, attributes or addresses came out of names."""
    count: int = page.evaluate("""() => document.querySelectorAll(
        "img[onerror], [src=x], a[href^='javascript:' i], body script, iframe, object, embed"
    ).length + [...document.querySelectorAll("*")].filter((each) => [...each.attributes].some(
        ({name}) => name.startsWith("on"))).length""")
    return count


@pytest.mark.parametrize("view", ["search", "browse", "map", "compare", "marks"])
def test_hostile_names_stay_text(site: Site, page: Page, watch: Watch, view: str) -> None:
    given = {"key": MARKUP} if view in ("search", "compare") else {}
    if view == "compare":
        watch.expect("status of 404")  # the other gallery has no such item
    page.goto(site.link(view, gallery=HOSTILE, other=SHOP, **given))
    if view == "map":
        expect(page.locator("#map-canvas")).to_have_attribute("data-points", str(len(NAMES)))
        expect(page.locator("#map-legend")).to_contain_text(MARKUP)
    elif view == "marks":
        marks = json.dumps([[name, name, 1] for name in NAMES])
        page.evaluate(f"marks => localStorage.setItem('crossbatch-marks-{HOSTILE}', marks)", marks)
        page.reload()
        expect(page.locator("#marks-table")).to_contain_text(MARKUP)
    else:
        place = {"search": "#results", "browse": "#browse-items", "compare": "#compare-left"}[view]
        shown = {*keys(page, place), *([MARKUP] if given else [])}
        assert shown == {*NAMES}
        for summary in page.locator(f"{place} .card summary").all():
            summary.click()
        expect(page.locator(place)).to_contain_text(RIGHT_TO_LEFT)
    assert made_of(page) == 0
    wide = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    assert page.title() == f"{view.capitalize()} · {HOSTILE} · crossbatch"


@pytest.mark.parametrize("area", ["localStorage", "sessionStorage"])
def test_a_browser_that_keeps_nothing_shows_the_page(site: Site, page: Page, area: str) -> None:
    forbidden = "{ get() { throw new DOMException('The operation is insecure.'); } }"
    page.add_init_script(f"Object.defineProperty(window, '{area}', {forbidden})")
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    found(page)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("r")
    kept = "This browser keeps no more marks" if area == "localStorage" else ""
    expect(page.locator("#toast")).to_contain_text(kept)


def test_an_item_of_any_name_can_be_searched_by(site: Site, page: Page) -> None:
    page.goto(site.link("browse", gallery=HOSTILE))
    for at, name in enumerate(keys(page, "#browse-items")):
        page.locator("#browse-items button.picture").nth(at).click()
        until(page, lambda now, name=name: now.get("key") == name)  # type: ignore[misc]
        assert {*found(page), name} == {*NAMES}
        expect(page.locator(".part")).to_contain_text(name)
        page.go_back()
        keys(page, "#browse-items")


def test_a_hostile_name_in_the_address_stays_text(site: Site, page: Page) -> None:
    page.goto(
        site.link("search", gallery=MARKUP, key=MARKUP, crop=MARKUP, filter=MARKUP, mix="[{}]", k="1e9")
    )
    expect(page.locator("main")).to_contain_text(f"There is no gallery “{MARKUP}”")
    assert made_of(page) == 0
    page.goto(site.link("search", gallery=SHOP, filter='[["<b>","is","<i>"],["x","constructor",1]]'))
    expect(page.locator(".chips li")).to_contain_text(["<b> is <i>"])
    assert made_of(page) == 0


def test_faults_of_each_kind_are_seen(site: Site, page: Page, watch: Watch) -> None:
    page.goto(site.url)
    keys(page)
    page.evaluate("""() => {
        console.error("told");
        setTimeout(() => { throw new Error("thrown"); });
        document.body.append(Object.assign(new Image(), {src: "http://elsewhere.test/"}));
        alert("asked");
    }""")
    page.goto(site.url.replace("127.0.0.1", "localhost"))
    keys(page)
    for fault in (
        "^told",
        "^exception: thrown",
        "Content Security Policy",
        "^dialog: asked",
        "request to http://local",
    ):
        assert any(re.search(fault, each) for each in watch.unmeant()), (fault, watch.faults)
    watch.faults.clear()
