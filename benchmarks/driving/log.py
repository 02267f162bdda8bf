"""What a benchmark says while it runs."""

import sys
import time

__all__ = ["tell"]


def tell(what: str) -> None:
    """Write a line to standard error, after the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
