"""The model files that a server is told of: looked at anew whenever models are loaded."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serving.cores import usable_cores
from serving.errors import BadArtifact, BadSetting, NotFound
from serving.model.encoder import Encoder
from serving.model.spec import ModelSpec
from serving.model.trial import load_encoder
from serving.settings import Settings

__all__ = ["ModelFile", "ModelRepository", "served_name"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that can be served."""

    name: str  # the name to serve it by; that of its spec when empty
    place: str  # where it is, as a message names it
    stamp: Hashable  # what is another when the file is another
    load: Callable[[], Encoder]


class ModelRepository:
    """The files that the words of `--model` stand for: FILE, FOLDER or NAME=FILE."""

    def __init__(self, settings: Settings) -> None:
        """Keep what was said; nothing is looked at yet."""
        self._settings = settings

    def look(self) -> Sequence[ModelFile]:
        """Tell which files there are now; those of a folder by name."""
        return [
            ModelFile(name, str(path), _stamp(path), partial(_load, path, self._settings))
            for word in self._settings.model
            for name, path in _files(word)
        ]

    def hide(self, text: str) -> str:
        """Take the folders that models lie in out of a message; the names of the files stay."""
        words = [part for word in self._settings.model for part in (word, word.partition("=")[2]) if part]
        for folder in sorted({str(Path(word).parent) for word in words}, key=len, reverse=True):
            if folder not in (".", "/"):
                text = text.replace(f"{folder}/", "")
        return text


def served_name(spec: ModelSpec) -> str:
    """Name a model that was given no name, another way for each precision of one run."""
    return spec.name if spec.precision == "fp32" else f"{spec.name}-{spec.precision}"


def _load(path: Path, settings: Settings) -> Encoder:
    threads = settings.threads or max(1, usable_cores() // settings.workers)
    return load_encoder(path, threads=threads, provider=settings.provider)


def _files(word: str) -> list[tuple[str, Path]]:
    """Names, empty ones where the model's own is meant, and files."""
    name, equals, rest = word.partition("=")
    if not equals or Path(word).exists():
        name, rest = "", word
    elif not name or not rest:
        raise BadSetting(f"--model {word} names no file; give FILE, FOLDER or NAME=FILE")
    path = Path(rest)
    if not path.is_dir():
        return [(name, path)]
    if name:
        raise BadSetting(f"--model {word} names a folder; only a file can be served by another name")
    found = sorted((each for each in path.glob("*.onnx") if each.is_file()), key=lambda each: each.stem)
    if not found:
        raise BadSetting(f"the folder {path} holds no .onnx file; give the one that export wrote to")
    return [(each.stem, each) for each in found]


def _stamp(path: Path) -> Hashable:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there; give the .onnx file that export wrote, or a folder") from error
    except OSError as error:
        raise BadArtifact(f"the model file {path} cannot be read: {error.strerror or error}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
