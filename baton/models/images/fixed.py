"""Images of one size, as LLaVA and Gemma 3 take them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from baton.models.images.encoder_input import TensorData
from baton.models.images.image_format import ImageFormat
from baton.models.images.image_tensors import PIXEL_VALUES, blank_pixels, check_tensors


@dataclass(frozen=True, slots=True)
class FixedImages(ImageFormat):
    """Images of one size, of the same number of tokens each.

    Attributes:
        placeholder_id: the token that stands for each token of an image.
        max_tokens: tokens of the largest image; here, of each.
        shape: of its pixels, `[1, channels, height, width]` in float32.
    """

    placeholder_id: int
    max_tokens: int
    shape: tuple[int, ...]
    kind: str = field(default="FixedImages", init=False)

    def split(self, processed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for pixels in processed[PIXEL_VALUES]:
            yield {PIXEL_VALUES: pixels[None]}

    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        check_tensors(tensors, {PIXEL_VALUES: ("float32", self.shape)})
        return (self.placeholder_id,) * self.max_tokens

    def blank(self) -> dict[str, TensorData]:
        return {PIXEL_VALUES: blank_pixels(self.shape)}


@dataclass(frozen=True, slots=True)
class GemmaImages(FixedImages):
    """Images of Gemma 3, whose tokens see each other in both directions.

    Attributes:
        begin_id: the token before an image, which stands for it in a text.
        end_id: the token after an image.
    """

    begin_id: int
    end_id: int
    kind: str = field(default="GemmaImages", init=False)

    is_bidirectional: ClassVar[bool] = True

    @property
    def options(self) -> Mapping[str, Any]:
        return {"do_pan_and_scan": False}


def fixed(config: Mapping[str, Any], vision: Mapping[str, Any]) -> FixedImages:
    """Returns the format of a LLaVA with a tower for images of one size."""
    side = vision["image_size"]
    num_tokens = (side // vision["patch_size"]) ** 2
    if vision["model_type"] == "clip_vision_model":
        num_tokens += 1  # its class token
    if config["vision_feature_select_strategy"] == "default":
        num_tokens -= 1
    shape = (1, vision["num_channels"], side, side)
    return FixedImages(config["image_token_index"], num_tokens, shape)


def gemma(config: Mapping[str, Any], vision: Mapping[str, Any]) -> GemmaImages:
    """Returns the format of a Gemma 3."""
    side = vision["image_size"]
    return GemmaImages(
        config["image_token_index"],
        config["mm_tokens_per_image"],
        (1, vision["num_channels"], side, side),
        config["boi_token_index"],
        config["eoi_token_index"],
    )
