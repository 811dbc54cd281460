"""Vision-language models that are implemented, and the format of the images in their prompts.

Knows nothing of torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

VISION_TOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    "llava": ("clip_vision_model", "siglip_vision_model"),
}
"""Vision towers of each model type, by their own model types: those with images of one size."""

PIXEL_VALUES = "pixel_values"
"""Name under which processors return the pixels of an image."""


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """Images of one size, as a model takes them.

    Attributes:
        placeholder_id: the token that stands for each token of an image.
        num_tokens: tokens of an image.
        shape: of its pixels, `[1, channels, height, width]` in float32.
    """

    placeholder_id: int
    num_tokens: int
    shape: tuple[int, ...]
