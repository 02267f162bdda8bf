"""Compare two galleries; mark results by keys, and keep the marks as CSV."""

import csv
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.serving.browser.looking import Site, drop, found, keys, until
from tests.serving.browser.shop import OTHER, SHOP, drawn

QUERY = "03/2.jpg"


def ranked(site: Site, gallery: str, query: str) -> list[str]:
    with site.client() as client:
        (hits,) = client.search(gallery, keys=[query], exclude=[query], k=12)
    return [hit.key for hit in hits]


def test_one_query_in_two_galleries(site: Site, page: Page, tmp_path: Path) -> None:
    page.goto(site.link("compare", gallery=SHOP, other=OTHER, key=QUERY))
    left, right = (ranked(site, gallery, QUERY) for gallery in (SHOP, OTHER))
    assert left != right
    assert keys(page, "#compare-left") == left
    assert keys(page, "#compare-right") == right
    both = len({*left} & {*right})
    expect(page.locator(".compared")).to_contain_text(f"{both} results shared; overlap@12 {both / 12:.3f}")
    for side, mine, others in (("left", left, right), ("right", right, left)):
        twins = page.locator(f"#compare-{side} .twin").all_inner_texts()
        assert twins == [
            f"{rank} · there {others.index(key) + 1}" if key in others else f"{rank} · only here"
            for rank, key in enumerate(mine, start=1)
        ]
    page.locator("#compare-left .card").nth(1).locator("button.picture").click()
    until(page, lambda now: now["key"] == left[1])
    assert keys(page, "#compare-right") == ranked(site, OTHER, left[1])
    page.locator(".compared button.picture").click()
    until(page, lambda now: now["view"] == "search" and "other" not in now)
    expect(page.locator("#other-input")).not_to_be_checked()
    page.go_back()
    keys(page, "#compare-right")
    (tmp_path / "photo.jpg").write_bytes(drawn(7, 2))
    drop(page, tmp_path / "photo.jpg")
    until(page, lambda now: "photo" in now and now["view"] == "compare")
    assert keys(page, "#compare-left")[0] == "07/2.jpg"


def test_the_queries_that_differ_most_come_first(site: Site, page: Page, tmp_path: Path) -> None:
    page.goto(site.link("compare", gallery=SHOP, other=OTHER))
    page.locator("#compare-random").click()
    rows = page.locator("#compare-table tbody tr")
    expect(rows).to_have_count(50)
    texts = rows.evaluate_all("all => all.map((each) => [...each.children].map((cell) => cell.textContent))")
    agreement = [float(each[2]) for each in texts]
    assert agreement == sorted(agreement)
    query, overlap = texts[0][0], float(texts[0][1])
    left, right = (ranked(site, gallery, query) for gallery in (SHOP, OTHER))
    assert overlap == pytest.approx(len({*left} & {*right}) / 12, abs=5e-4)
    with page.expect_download() as download:
        page.locator("#export-comparison").click()
    download.value.save_as(tmp_path / "compared.csv")
    with (tmp_path / "compared.csv").open(newline="") as file:
        kept = list(csv.reader(file))
    assert kept[0] == ["query", "overlap@12", "rank-biased overlap"]
    assert [row[0] for row in kept[1:]] == [each[0] for each in texts]
    rows.first.locator("a").click()
    until(page, lambda now: now.get("key") == query)
    assert keys(page, "#compare-left") == left
    (tmp_path / "keys.txt").write_text(f"{QUERY}\n00/0.jpg\nnowhere.jpg\n")
    page.locator("input[type=file][accept*=text]").set_input_files(tmp_path / "keys.txt")
    until(page, lambda now: "nowhere" in now.get("list", ""))
    expect(rows).to_have_count(3)
    expect(rows.last).to_contain_text("nowhere.jpg")


def test_results_are_marked_by_keys_and_kept_as_csv(site: Site, page: Page, tmp_path: Path) -> None:
    page.goto(site.link("search", gallery=SHOP, key=QUERY))
    results = found(page)
    page.locator("#results button.picture").first.focus()
    for letter in ("r", "ArrowRight", "w", "ArrowRight", "r", "ArrowRight", "w", "u"):
        page.keyboard.press(letter)
    cards = page.locator("#results .card")
    marked = [cards.nth(at).get_attribute("data-mark") for at in range(4)]
    assert marked == ["right", "wrong", "right", "unmarked"]
    page.reload()
    found(page)
    expect(cards.first).to_have_attribute("data-mark", "right")
    page.keyboard.press("5")
    until(page, lambda now: now["view"] == "marks")
    expect(page.locator("#marks-table caption")).to_contain_text("3 marks of 1 queries in products")
    with page.expect_download() as download:
        page.locator("#export-marks").click()
    assert download.value.suggested_filename == f"marks-{SHOP}.csv"
    download.value.save_as(tmp_path / "marks.csv")
    with (tmp_path / "marks.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["query", "result", "relevant"],
        *([QUERY, results[at], mark] for at, mark in enumerate("101")),
    ]
    page.evaluate("localStorage.clear()")
    page.reload()
    expect(page.locator("main")).to_contain_text("No marks yet")
