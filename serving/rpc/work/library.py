"""The model files that a server is told of: looked at anew whenever models are loaded."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it brings an engine, which whoever imports only the settings does not need
    from serving.model.encoder import Encoder
    from serving.rpc.server.settings import Settings

__all__ = ["Library", "Source", "Sources"]


class Source(Protocol):
    """A model that can be served."""

    @property
    def name(self) -> str:
        """The name to serve it by; that of its spec when empty."""

    @property
    def stamp(self) -> Hashable:
        """What is another when the file is another."""

    def load(self) -> "Encoder":
        """Load it; blocks.

        Raises:
            CrossbatchError: if it cannot be served.
        """


class Sources(Protocol):
    """Where a server finds its models."""

    def look(self) -> Sequence[Source]:
        """Tell which models there are now, in the order in which they are served; blocks.

        Raises:
            CrossbatchError: if there are none, or a file is not there.
        """


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: Path
    stamp: Hashable
    settings: "Settings"

    def load(self) -> "Encoder":
        from serving.model.encoder import Encoder

        return Encoder(self.path, threads=self.settings.threads, device=self.settings.device)


class Library:
    """The files of `--model`."""

    def __init__(self, settings: "Settings") -> None:
        """Keep what was said; nothing is looked at yet."""
        self._settings = settings

    def look(self) -> Sequence[Source]:
        """Tell which files there are now.

        Raises:
            CrossbatchError: if one is not there.
        """
        return [_File("", Path(word), word, self._settings) for word in self._settings.model]
