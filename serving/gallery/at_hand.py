"""What is raised instead of a wait, where whoever asks cannot wait."""

__all__ = ["NotAtHand"]


class NotAtHand(Exception):
    """A gallery that has first to be opened or to be read on; ask again where that may take time."""
