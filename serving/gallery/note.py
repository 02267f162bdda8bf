"""The note in the folder of a gallery that follows another: what it is a copy of, and how old that is.

The follower writes it, the server reads it. The next generation would undo any other write: none is taken.
"""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from serving.errors import BadArtifact, ReadOnly
from serving.gallery.disk import rewrite

__all__ = ["NOTE_NAME", "Note", "check_own", "read_note", "write_note"]

NOTE_NAME = "followed.json"


@dataclass(frozen=True, slots=True)
class Note:
    """What a followed gallery is a copy of."""

    folder: str
    host: str  # of the writer
    generation: int
    id: str
    time: str  # ISO 8601; so late this was the writer's state for certain
    served: bool  # whether it ever had the name that is followed

    def lag(self) -> float:
        """Return for how many seconds the writer may have had a newer state."""
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(self.time)).total_seconds())


def read_note(gallery: Path) -> Note | None:
    """Return the note in a gallery's folder, None where there is none: it follows nobody."""
    try:
        note = Note(**json.loads((gallery / NOTE_NAME).read_bytes()))
        note.lag()
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        raise BadArtifact(
            f"{gallery / NOTE_NAME} does not tell what the gallery follows ({error}); drop the gallery, and "
            "crossbatch gallery follow fetches it again"
        ) from error
    return note


def write_note(gallery: Path, note: Note) -> None:
    """Put a note into a gallery's folder, in place of the one before."""
    rewrite(gallery / NOTE_NAME, json.dumps(asdict(note)))


def check_own(gallery: Path) -> None:
    """Raise ReadOnly for a gallery that follows another."""
    if (note := read_note(gallery)) is not None:
        raise ReadOnly(
            f"the gallery {gallery.name} follows the one that {note.host} publishes, whose next generation "
            "would undo a write here; write to that one"
        )
