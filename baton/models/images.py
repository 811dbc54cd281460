"""Image formats of vision-language models: the tensors that a model takes of an image, and the
tokens that stand for it in a prompt.

Knows nothing of torch. All formats have the same methods; a family of models adds its own to
`ImageFormat` and to `read_image_format`.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from baton.encoder_input import TensorData
from baton.errors import InvalidArgumentError, UnsupportedModelError

VISION_TOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    "llava": ("clip_vision_model", "siglip_vision_model"),
}
"""Vision towers of each model type that is implemented, by their own model types."""

PIXEL_VALUES = "pixel_values"
"""Name under which processors return the pixels of an image."""

ELEMENT_BYTES: Final[Mapping[str, int]] = {"float32": 4, "int64": 8}
"""Bytes of an element, by the dtypes that processors return."""


class FixedImages(msgspec.Struct, frozen=True, tag=True):
    """Images of one size, of the same number of tokens each.

    Attributes:
        placeholder_id: the token that stands for each token of an image.
        max_tokens: tokens of the largest image; here, of each.
        shape: of its pixels, `[1, channels, height, width]` in float32.
    """

    placeholder_id: int
    max_tokens: int
    shape: tuple[int, ...]

    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        """Returns the tokens that stand for an image in a prompt, one for each row of its encoder
        output. Raises `InvalidArgumentError` for tensors that the encoder could not compute.

        Args:
            tensors: of one image, by the names of the model's processor.
        """
        check_tensors(tensors, {PIXEL_VALUES: ("float32", self.shape)})
        return (self.placeholder_id,) * self.max_tokens


ImageFormat = FixedImages
"""Any of the formats. Structs, so that they keep their type on the way from an engine's process."""


def check_tensors(
    tensors: Mapping[str, TensorData], expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Raises `InvalidArgumentError` unless these are the tensors of `expected`, which has the dtype
    and the shape of each."""
    forms = {name: (data.dtype, data.shape) for name, data in tensors.items()}
    if forms != expected:
        raise InvalidArgumentError("tensors", f"are {forms}; expected {dict(expected)}")
    for name, data in tensors.items():
        size = math.prod(data.shape) * ELEMENT_BYTES[data.dtype]
        if len(data.data) != size:
            raise InvalidArgumentError(
                f"tensors[{name!r}]", f"has {len(data.data)} bytes; expected {size}"
            )


def read_image_format(config: Mapping[str, Any]) -> ImageFormat | None:
    """Returns the format of the images that a model takes; None: it takes none.

    Args:
        config: the content of its config.json, with every field that transformers would set.

    Raises `UnsupportedModelError` for a family that is implemented with another vision tower.
    """
    model_type = config.get("model_type", "")
    towers = VISION_TOWERS.get(model_type)
    if towers is None:
        return None
    vision = config["vision_config"]
    if (tower := vision["model_type"]) not in towers:
        raise UnsupportedModelError(
            f"the vision tower of this {model_type} is {tower}; implemented are "
            f"{' and '.join(towers)}"
        )
    return _fixed(config, vision)


def _fixed(config: Mapping[str, Any], vision: Mapping[str, Any]) -> FixedImages:
    side = vision["image_size"]
    num_tokens = (side // vision["patch_size"]) ** 2
    if vision["model_type"] == "clip_vision_model":
        num_tokens += 1  # its class token
    if config["vision_feature_select_strategy"] == "default":
        num_tokens -= 1
    shape = (1, vision["num_channels"], side, side)
    return FixedImages(config["image_token_index"], num_tokens, shape)
