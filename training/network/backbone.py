"""Backbones by name: pictures to feature maps, whatever form the network itself gives them.

Letters: B images, S pixels a side, h * w locations.
"""

import difflib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import timm
from timm.models import group_parameters
from torch import Tensor, nn

from serving.errors import BadSetting
from training.network.networks import BNInception, ResNet20
from training.network.weights import first_line, fit_weights, read_weights

__all__ = ["Backbone", "build_backbone"]

Order = Literal["RGB", "BGR"]


class Backbone(nn.Module):
    """A feature extractor and the normalisation that it was trained with."""

    def __init__(
        self,
        body: nn.Module,
        channels: int,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        order: Order = "RGB",
    ) -> None:
        super().__init__()
        self.body, self.channels = body, channels
        self.mean, self.std = mean, std  # of pixels in 0..1, in the body's own order of colours
        self.order: Order = order

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float32 (B, 3, S, S), normalised, to features (B, channels, h, w)."""
        return _as_map(self.body(images), self.body, images)

    @property
    def middle(self) -> nn.Module:
        """The module half way, whose output, batch first, can be replaced by that of other images."""
        own = getattr(self.body, "middle", None)
        if isinstance(own, nn.Module):
            return own
        stages = getattr(self.body, "feature_info", None)  # timm's: a list, or an object around one
        stages = list(getattr(stages, "info", stages) or ())
        try:
            return self.body.get_submodule(stages[(len(stages) - 1) // 2]["module"])
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            raise BadSetting(
                "the backbone does not say what its stages are, so that nothing can be mixed half way:"
                " choose another backbone or another mixing"
            ) from error

    def freeze(self, stages: int) -> None:
        """Stop the training of the first `stages` stages, the stem being one."""
        if stages == 0:
            return
        # timm's own grouping: stage number to the names of its parameters, from the input on
        matcher = self.body.group_matcher(coarse=True)  # type: ignore[operator]
        layers = group_parameters(self.body, matcher, reverse=False)
        if stages >= len(layers):
            raise BadSetting(f"freeze_stages is {stages}, but the backbone has only {len(layers)} stages")
        frozen = {name for stage in sorted(layers)[:stages] for name in layers[stage]}
        for name, parameter in self.body.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)


class _Own(NamedTuple):
    """A network that is not timm's; the classifier is one that its weights files hold."""

    body: Callable[[], Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    order: Order = "RGB"
    classifier: tuple[str, ...] = ()


_OWN = {
    "resnet20": _Own(ResNet20, (0.5,) * 3, (0.5,) * 3),
    "bn_inception": _Own(
        BNInception, (104 / 255, 117 / 255, 128 / 255), (1 / 255,) * 3, "BGR", ("last_linear",)
    ),
}


def build_backbone(name: str, weights: str = "none", *, image_size: int | None = None) -> Backbone:
    """Build a backbone, (B, 3, S, S) to (B, channels, h, w), and load its weights.

    Args:
        name: `resnet20`, `bn_inception`, or a model of timm.
        weights: `none` for a random start, `published` for the usual file in a cache of this machine,
            `package:MODULE` for weights installed by pip, else the path of a `.safetensors`, `.pth` or `.pt`
            file.
        image_size: S, for networks made for one size of image; the size of the published weights when None.
    """
    if name in _OWN:
        own = _OWN[name]
        body = own.body()
        backbone = Backbone(body, body.num_features, mean=own.mean, std=own.std, order=own.order)
        classifier = own.classifier
    elif timm.is_model(name):
        backbone, classifier = _build_timm(name, image_size)
    else:
        close = difflib.get_close_matches(name, [*_OWN, *timm.list_models()], n=1)
        nearest = f" (nearest: {close[0]})" if close else ""
        raise BadSetting(f"no backbone is called {name!r}: use {', '.join(_OWN)} or a model of timm{nearest}")
    if weights != "none":
        state, source = read_weights(weights, name)
        fit_weights(backbone.body, state, source=source, classifier=classifier)
    return backbone


def _build_timm(name: str, image_size: int | None) -> tuple[Backbone, tuple[str, ...]]:
    """Build a model of timm without weights, and name the layers that only its classifier needs."""
    size: dict[str, Any] = {}
    try:
        published = timm.get_pretrained_cfg(name)  # how timm trained it: only read for what its images were
        if published is not None and published.fixed_input_size and image_size:
            size = {"img_size": image_size}
        body: Any = timm.create_model(name, pretrained=False, num_classes=0, **size)
        body.reset_classifier(0, "")  # only now, so that all other layers are those of the weights files
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        where = f" for images of {image_size} px" if size else ""
        raise BadSetting(f"timm cannot make a feature map of {name}{where}: {first_line(error)}") from error
    patch = _patch_size(body)
    if patch and image_size and any(image_size % side for side in patch):
        raise BadSetting(
            f"{name} cuts images into patches of {patch[0]} px, so that image_size has to be a multiple of"
            f" {patch[0]}, and it is {image_size}"
        )
    config = body.pretrained_cfg
    found = config.get("classifier") or ()
    classifier = (found,) if isinstance(found, str) else tuple(found)
    backbone = Backbone(body, body.head_hidden_size, mean=tuple(config["mean"]), std=tuple(config["std"]))
    return backbone, (*classifier, "attn_pool")


def _patch_size(body: nn.Module) -> tuple[int, int] | None:
    """Tell how many pixels (height, width) a token stands for, if the network cuts images into patches."""
    ratio = getattr(getattr(body, "patch_embed", None), "feat_ratio", None)
    if ratio is None:
        return None
    height, width = ratio(as_scalar=False)
    return int(height), int(width)


def _as_map(features: Tensor, body: nn.Module, images: Tensor) -> Tensor:
    """Lay out what the body gives for images (B, 3, S, S) as (B, channels, h, w); what has no places stays.

    Of tokens (B, p + h * w, channels) the first p, a class token and registers, stand for no place.
    """
    if features.ndim == 4 and str(getattr(body, "output_fmt", "NCHW")) == "NHWC":
        return features.permute(0, 3, 1, 2)
    patch = _patch_size(body)
    if features.ndim == 3 and patch:
        h, w = images.shape[2] // patch[0], images.shape[3] // patch[1]
        prefix = int(getattr(body, "num_prefix_tokens", 0))
        if features.shape[1] == prefix + h * w:
            places = features[:, prefix:].transpose(1, 2)  # (B, channels, n), row by row
            return places.reshape(*places.shape[:2], h, w)
    return features
