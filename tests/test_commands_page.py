"""docs/commands.md is what scripts/commands.py makes of the settings as they are."""

from scripts.commands import ROOT, page


def test_the_page_is_of_today() -> None:
    found = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert found == page(), "run `python scripts/commands.py`"
