"""Images in tiles, as InternVL takes them: as many tiles of one size as fit the image's shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.models.images.encoder_input import TensorData
from baton.models.images.image_format import ImageFormat
from baton.models.images.image_tensors import PIXEL_VALUES, blank_pixels, check_tensors

MAX_TILES: Final = 13
"""Most tiles of an image, as InternVL was trained: 12, and one of the whole image. Configurations
of models do not tell."""


@dataclass(frozen=True, slots=True)
class TiledImages(ImageFormat):
    """Images in tiles of one size, of the same number of tokens each.

    Attributes:
        placeholder_id: the token that stands for each token of an image.
        max_tokens: tokens of the largest image.
        shape: of a tile's pixels, `(channels, height, width)`.
        tokens_per_tile: tokens of one tile.
    """

    placeholder_id: int
    max_tokens: int
    shape: tuple[int, ...]
    tokens_per_tile: int
    kind: str = field(default="TiledImages", init=False)

    @property
    def options(self) -> Mapping[str, Any]:
        return {"crop_to_patches": True}

    def split(self, processed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        tiles, first = processed[PIXEL_VALUES], 0
        for num_tiles in processed["num_patches"].tolist():
            yield {PIXEL_VALUES: tiles[first : first + num_tiles]}
            first += num_tiles

    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        pixels = tensors.get(PIXEL_VALUES)
        num_tiles = pixels.shape[0] if pixels is not None and pixels.shape else 1
        check_tensors(tensors, {PIXEL_VALUES: ("float32", (num_tiles, *self.shape))})
        if not 1 <= num_tiles <= MAX_TILES:
            raise InvalidArgumentError(
                "tensors", f"have {num_tiles} tiles; expected 1 to {MAX_TILES} for an image"
            )
        return (self.placeholder_id,) * (num_tiles * self.tokens_per_tile)

    def blank(self) -> dict[str, TensorData]:
        return {PIXEL_VALUES: blank_pixels((1, *self.shape))}


def tiled(config: Mapping[str, Any], vision: Mapping[str, Any]) -> TiledImages:
    """Returns the format of an InternVL. Raises `UnsupportedModelError` for features that are not
    those of a square of patches."""
    if (strategy := config["vision_feature_select_strategy"]) != "default":
        raise UnsupportedModelError(
            f"the vision_feature_select_strategy of this internvl is {strategy}; implemented is "
            "default"
        )
    height, width = vision["image_size"]
    side = int(height // vision["patch_size"][0] * config["downsample_ratio"])
    shape = (vision["num_channels"], height, width)
    return TiledImages(config["image_token_id"], MAX_TILES * side**2, shape, side**2)
