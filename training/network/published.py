"""Published weights: the usual file of a backbone, found in the caches of this machine; never downloaded."""

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import timm
import torch
from huggingface_hub import try_to_load_from_cache

from serving.errors import BadArtifact, BadSetting, NotFound

__all__ = ["check_digest", "find_published"]

_NAMED_BY_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.\w+$")
"""torch's own rule for names in its hub: the first digits of the SHA-256 behind the last dash."""


class _Published(NamedTuple):
    """Where a file comes from, what it is called in torch's cache, and where Hugging Face's has it."""

    url: str
    name: str
    repository: str = ""
    files: tuple[str, ...] = ()


_USUAL = {
    "bn_inception": "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-239d2248.pth",
    "resnet50": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
}
"""Files that results in the literature start from, where timm has others."""


def find_published(backbone: str) -> Path:
    """Find the file of a backbone's published weights.

    Returns:
        The file in torch's hub cache or in Hugging Face's.

    Raises:
        BadSetting: If no weights of that backbone are published.
        NotFound: If the file is in neither cache; says where it is to be had and where to put it.
    """
    published = _published(backbone)
    for name in published.files:
        cached = try_to_load_from_cache(published.repository, name)
        if isinstance(cached, str):  # else None, or a mark that there is no such file
            return Path(cached)
    path = Path(torch.hub.get_dir(), "checkpoints", published.name)
    if not path.is_file():
        raise NotFound(
            f"the published weights of {backbone} are not on this machine: put {published.url} at {path}, or"
            " set `weights` to the path of that file, or to none"
        )
    return path


def check_digest(path: Path) -> None:
    """Refuse a file whose name gives the first digits of another SHA-256 than its own.

    Digits that are all decimal are taken for a date or a count.

    Raises:
        BadArtifact: If it is another file, or one that was cut short.
    """
    found = _NAMED_BY_DIGEST.search(path.name)
    if not found or found[1].isdecimal():
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(found[1]):
        raise BadArtifact(
            f"{path} is not the file that its name says: its SHA-256 begins with {digest[: len(found[1])]};"
            " download it again, or rename it if the end of its name means something else"
        )


def _published(backbone: str) -> _Published:
    if backbone in _USUAL:
        return _Published(_USUAL[backbone], PurePosixPath(_USUAL[backbone]).name)
    config = timm.get_pretrained_cfg(backbone) if timm.is_model(backbone) else None
    if config is not None and config.hf_hub_id:
        name = config.hf_hub_filename or "model.safetensors"
        url = f"https://huggingface.co/{config.hf_hub_id}/resolve/main/{name}"
        # the file is called alike in all repositories: in torch's cache it has the repository's name
        local = PurePosixPath(config.hf_hub_id).name + PurePosixPath(name).suffix
        files = (name,) if config.hf_hub_filename else (name, "pytorch_model.bin")
        return _Published(url, local, config.hf_hub_id, files)
    if config is not None and isinstance(config.url, str) and config.url:
        return _Published(config.url, PurePosixPath(config.url).name)
    raise BadSetting(
        f"no weights of {backbone} are published: set `weights` to the path of a file, or to none"
    )
