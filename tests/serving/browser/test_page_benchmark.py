"""The benchmark of the page, in short: a small gallery, once."""

from typing import Any

from playwright.sync_api import Browser

from benchmarks import page


def test_the_page_is_measured_view_by_view(chromium: Browser) -> None:
    with page.served(None, None, 300) as (url, gallery):
        views = ["search, by item", "map"]
        rows = list(page.measured(chromium, url, gallery, 1, views))
    assert [row["view"] for row in rows] == views
    assert [row.get("items") for row in rows] == [24, None]
    for row in rows:
        assert {"first paint ms", "grid ms", "KB"} <= row.keys()
        assert float(str(row["first paint ms"])) > 0
    assert float(str(rows[-1]["frames/s"])) > 0
    shown = page.table(rows).splitlines()
    assert shown[0] == "| view | first paint ms | grid ms | items | KB | frames/s |"
    assert len(shown) == 2 + len(rows)


def test_what_is_slower_than_its_bound_is_told() -> None:
    rows: list[dict[str, Any]] = [
        {"view": "browse", "first paint ms": 1001.0, "grid ms": 299.0, "items": 60.0},
        {"view": "map"},
    ]
    assert page.missed(rows) == ["browse: first paint ms 1001, at most 1000"]
