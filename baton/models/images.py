"""Image formats of vision-language models: the tensors that a model takes of an image, and the
tokens that stand for it in a prompt.

Knows nothing of torch. All formats have the same methods; a family of models adds its own to
`ImageFormat` and to `read_image_format`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from baton.encoder_input import TensorData
from baton.errors import UnsupportedModelError
from baton.models.image_tensors import PIXEL_VALUES, blank_pixels, check_tensors
from baton.models.pixtral_images import TOWER, PixtralImages, pixtral
from baton.models.tiled_images import TiledImages, tiled

VISION_TOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    "llava": ("clip_vision_model", "siglip_vision_model", TOWER),
    "internvl": ("internvl_vision",),
    "mistral3": (TOWER,),
}
"""Vision towers of each model type that is implemented, by their own model types."""


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

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the image processor, besides those of its configuration."""
        return {}

    def split(self, processed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the tensors of each image.

        Args:
            processed: output of the image processor for several images.
        """
        for pixels in processed[PIXEL_VALUES]:
            yield {PIXEL_VALUES: pixels[None]}

    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        """Returns the tokens that stand for an image in a prompt, one for each row of its encoder
        output. Raises `InvalidArgumentError` for tensors that the encoder could not compute.

        Args:
            tensors: of one image, by the names of the model's processor.
        """
        check_tensors(tensors, {PIXEL_VALUES: ("float32", self.shape)})
        return (self.placeholder_id,) * self.max_tokens

    def blank(self) -> dict[str, TensorData]:
        """Returns the tensors of a small image, for a trial of the encoder."""
        return {PIXEL_VALUES: blank_pixels(self.shape)}


ImageFormat = FixedImages | TiledImages | PixtralImages
"""Any of the formats. Structs, so that they keep their type on the way from an engine's process."""


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
    if model_type == "internvl":
        return tiled(config, vision)
    if tower == TOWER:
        return pixtral(config, vision)
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
