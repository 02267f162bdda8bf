"""How many inputs a request may have, and how many entries a page."""

from serving.rpc.limits import DEFAULT_PAGE, MAX_PAGE
from serving.rpc.status import refusal

__all__ = ["check_count", "page_size"]


def check_count(field: str, count: int, most: int) -> None:
    """Check how many inputs a request has.

    Raises:
        Refusal: if there are none or more than `most`; names the field.
    """
    if not 1 <= count <= most:
        raise refusal(field, f"{count} were sent; a call takes 1 to {most:,}. Split it.")


def page_size(wanted: int) -> int:
    """Return how many entries a page has at most.

    Raises:
        Refusal: if more were asked for than a page may have; names the field.
    """
    if wanted > MAX_PAGE:
        raise refusal("page_size", f"{wanted} were asked for; a page holds at most {MAX_PAGE:,}.")
    return wanted or DEFAULT_PAGE
