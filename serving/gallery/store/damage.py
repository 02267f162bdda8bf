"""What SQLite takes for a sound file and no gallery of ours can hold: it is told as damage, in one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import BadArtifact

__all__ = ["altered", "damaged", "sound"]


def damaged(path: Path, what: object) -> BadArtifact:
    """Return what a user reads when a gallery file is damaged."""
    return BadArtifact(
        f"the gallery file {path} is damaged ({what}); restore it from a backup, "
        "or drop the gallery and index its images again"
    )


def altered(path: Path, what: str) -> BadArtifact:
    """Return what a user reads when something has another checksum than the one it was stored with."""
    return damaged(path, f"{what} has been altered: its checksum does not match")


@contextmanager
def sound(path: Path, what: str) -> Iterator[None]:
    """Make sense of what was read from a gallery file; that there is none shows damage.

    Args:
        path: The file.
        what: What is read, as "its metadata".

    Raises:
        BadArtifact: Something is missing, or of a kind that is never written.
    """
    try:
        yield
    # A UnicodeDecodeError, a JSONDecodeError and an array that cannot be made are ValueErrors.
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise damaged(path, f"{what} cannot be read: {type(error).__name__} {error}") from error
