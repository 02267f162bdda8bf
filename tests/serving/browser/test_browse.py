"""Browse: galleries, fields, items, duplicates, and the dialog that changes an item."""

import pytest
from playwright.sync_api import Page, expect

from serving.client.records import Item
from tests.serving.browser.looking import Site, Watch, card, keys, state, until
from tests.serving.browser.shop import EDITED, HOSTILE, OTHER, SHOP

ITEMS = "#browse-items"


def test_galleries_fields_and_items_are_listed(site: Site, page: Page) -> None:
    page.goto(site.link("browse", gallery=SHOP))
    assert len(keys(page, ITEMS)) == 60
    expect(page.locator("main")).to_contain_text("73 items")
    galleries = page.locator("#gallery-list")
    for name in (SHOP, OTHER, EDITED, HOSTILE):
        expect(galleries).to_contain_text(name)
    expect(galleries.locator("li", has_text=SHOP)).to_contain_text("73 items of 48 numbers by layout")
    price = page.locator("#field-list details", has_text="price")
    expect(price).to_contain_text("72 number, 0.5 to 115.5")
    page.locator("#next-page").click()
    until(page, lambda now: "page" in now)
    expect(page.locator(f"{ITEMS} .card")).to_have_count(13)
    with site.client() as client:
        every = [item.key for item in client.items(SHOP)]
    assert keys(page, ITEMS) == every[60:]
    page.locator("#gallery-select").select_option(OTHER)
    until(page, lambda now: now["gallery"] == OTHER and "page" not in now)
    page.go_back()
    page.go_back()
    until(page, lambda now: now["gallery"] == SHOP and "page" not in now)
    expect(page.locator(f"{ITEMS} .card")).to_have_count(60)
    assert keys(page, ITEMS) == every[:60]


def test_a_value_of_a_field_filters_and_a_key_is_found(site: Site, page: Page) -> None:
    page.goto(site.link("browse", gallery=SHOP))
    keys(page, ITEMS)
    colour = page.locator("#field-list details", has_text="colour")
    colour.locator("summary").click()
    first = colour.locator(".values button").first
    name, count = first.locator("span").inner_text(), first.locator("b").inner_text()
    first.click()
    until(page, lambda now: "filter" in now)
    expect(page.locator(f"{ITEMS} .card")).to_have_count(int(count))
    with site.client() as client:
        assert client.count(SHOP, filter={"colour": name}) == int(count)
    page.locator("#key-input").fill("07/")
    until(page, lambda now: now.get("prefix") == "07/")
    expect(page.locator(f"{ITEMS} .card")).to_have_count(6)
    assert all(each.startswith("07/") for each in keys(page, ITEMS))
    page.locator("#key-input").fill("no such")
    expect(page.locator("main")).to_contain_text("No key begins with “no such”.")


def test_random_items_are_the_same_for_who_follows_the_link(site: Site, page: Page) -> None:
    page.goto(site.link("browse", gallery=SHOP))
    keys(page, ITEMS)
    page.get_by_role("button", name="Random").click()
    until(page, lambda now: "seed" in now)
    expect(page.locator("main")).to_contain_text("at random")
    drawn = keys(page, ITEMS)
    assert len(set(drawn)) == 60
    page.reload()
    assert keys(page, ITEMS) == drawn
    seed = state(page)["seed"]
    page.get_by_role("button", name="Random").click()
    until(page, lambda now: now["seed"] != seed)
    assert keys(page, ITEMS) != drawn


def test_pictures_that_are_there_twice_are_found(site: Site, page: Page) -> None:
    page.goto(site.link("browse", gallery=SHOP, show="duplicates", above=0.999))
    pair = page.locator("#duplicates > li")
    expect(pair).to_have_count(1)
    assert sorted(keys(page, "#duplicates")) == ["03/3.jpg", "again.jpg"]
    expect(pair).to_contain_text("1.000 same label")
    expect(pair.locator("img")).to_have_count(2)


def opened(page: Page, key: str) -> None:
    card(page, key).locator("button.picture").focus()
    page.keyboard.press("e")
    expect(page.locator("#edit-dialog")).to_be_visible()


def test_an_item_is_changed(site: Site, page: Page) -> None:
    page.goto(site.link("browse", gallery=EDITED))
    keys(page, ITEMS)
    opened(page, "00/1.jpg")
    page.locator("#edit-label").fill("a new label")
    price = page.locator("#edit-dialog .field-row").filter(has=page.locator("input[value=price]"))
    price.get_by_label("Value", exact=True).fill("7.25")
    page.get_by_role("button", name="Remove colour").click()
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#edit-dialog")).to_have_count(0)
    expect(card(page, "00/1.jpg")).to_contain_text("a new label")
    with site.client() as client:
        item = client.get(EDITED, "00/1.jpg")
    assert item.label == "a new label"
    assert item.metadata["price"] == 7.25
    assert "colour" not in item.metadata
    assert item.metadata["tags"][1] == "new"


@pytest.mark.parametrize("mine", [True, False])
def test_two_who_change_an_item_are_told_of_one_another(
    site: Site, page: Page, watch: Watch, mine: bool
) -> None:
    watch.expect("status of 409")
    page.goto(site.link("browse", gallery=EDITED))
    keys(page, ITEMS)
    opened(page, "00/2.jpg")
    own = f"mine {mine}"
    page.locator("#edit-label").fill(own)
    with site.client() as client:
        client.update(EDITED, [Item("00/2.jpg", label="theirs", metadata={"price": 99})])
        page.get_by_role("button", name="Save").click()
        told = page.locator("#edit-dialog [role=alert]")
        expect(told).to_contain_text("Somebody changed this item while it was open here.")
        expect(told).to_contain_text(f'"theirs" there now, "{own}" yours')
        name = "Write mine over it" if mine else "Take what is there"
        page.get_by_role("button", name=name).click()
        if mine:
            expect(page.locator("#edit-dialog")).to_have_count(0)
            item = client.get(EDITED, "00/2.jpg")
            assert (item.label, item.metadata["price"]) == (own, 99)
        else:
            expect(page.locator("#edit-label")).to_have_value("theirs")
            page.get_by_role("button", name="Cancel").click()
            assert client.get(EDITED, "00/2.jpg").label == "theirs"
