"""Images of one size, as LLaVA and Gemma 3 take them."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from baton.encoder_input import TensorData
from baton.models.image_tensors import PIXEL_VALUES, blank_pixels, check_tensors


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

    is_bidirectional: ClassVar[bool] = False
    """Whether the tokens of an image see each other in both directions: then all of an image that
    is not cached is computed in one step."""

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
        """Returns the tensors of a small image, for a trial of the encoder. Its span has all tokens
        that spans may have."""
        return {PIXEL_VALUES: blank_pixels(self.shape)}


class GemmaImages(FixedImages, frozen=True, tag=True):
    """Images of Gemma 3, whose tokens see each other in both directions.

    Attributes:
        begin_id: the token before an image, which stands for it in a text.
        end_id: the token after an image.
    """

    begin_id: int
    end_id: int

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
