"""Images in patches, as Qwen-VL takes them: as many as an image of any size has."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import TensorData
from baton.models.images.image_format import ImageFormat
from baton.models.images.image_tensors import PIXEL_VALUES, blank_pixels, check_tensors

IMAGE_GRID: Final = "image_grid_thw"
"""Name under which processors return the patches of an image in time, height and width."""


@dataclass(frozen=True, slots=True)
class PatchedImages(ImageFormat):
    """Images of any size, in patches, of which `merge_size` in each direction are one token
    (Qwen-VL). They have rotary positions of three dimensions.

    Attributes:
        placeholder_id: the token that stands for each token of an image.
        max_tokens: tokens of the largest image.
        patch_dim: numbers in a patch.
        merge_size: patches in each direction that make up a token.
    """

    placeholder_id: int
    max_tokens: int
    patch_dim: int
    merge_size: int
    kind: str = field(default="PatchedImages", init=False)

    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        num_patches = next(iter(tensors[PIXEL_VALUES].shape), 0) if PIXEL_VALUES in tensors else 0
        check_tensors(
            tensors,
            {
                PIXEL_VALUES: ("float32", (num_patches, self.patch_dim)),
                IMAGE_GRID: ("int64", (1, 3)),
            },
        )
        frames, height, width = struct.unpack("<3q", tensors[IMAGE_GRID].data)
        if frames != 1 or min(height, width) < 1 or (height | width) % self.merge_size:
            raise InvalidArgumentError(
                f"tensors[{IMAGE_GRID!r}]",
                f"is {frames}, {height}, {width}; expected 1 and multiples of {self.merge_size}",
            )
        if height * width != num_patches:
            raise InvalidArgumentError(
                f"tensors[{PIXEL_VALUES!r}]",
                f"has {num_patches} patches; expected {height * width} by the grid",
            )
        return (self.placeholder_id,) * (num_patches // self.merge_size**2)

    def split(self, processed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        begin = 0
        for grid in processed[IMAGE_GRID]:
            end = begin + math.prod(grid.tolist())
            yield {PIXEL_VALUES: processed[PIXEL_VALUES][begin:end], IMAGE_GRID: grid[None]}
            begin = end

    def blank(self) -> dict[str, TensorData]:
        grid = (1, self.merge_size, 2 * self.merge_size)
        return {
            PIXEL_VALUES: blank_pixels((math.prod(grid), self.patch_dim)),
            IMAGE_GRID: TensorData("int64", (1, 3), struct.pack("<3q", *grid)),
        }

    def grid(self, tensors: Mapping[str, TensorData]) -> tuple[int, int]:
        """Returns an image's tokens in height and width."""
        _, height, width = struct.unpack("<3q", tensors[IMAGE_GRID].data)
        return height // self.merge_size, width // self.merge_size


def patched(
    config: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]
) -> PatchedImages:
    """Returns the format of a Qwen-VL."""
    side, merge = vision["patch_size"], vision["spatial_merge_size"]
    patch_dim = vision["in_channels"] * vision["temporal_patch_size"] * side**2
    max_tokens = config["text_config"]["max_position_embeddings"]
    max_pixels = (processor.get("size") or {}).get("longest_edge") or processor.get("max_pixels")
    if max_pixels:
        max_tokens = min(max_tokens, max(1, max_pixels // (side * merge) ** 2))
    return PatchedImages(config["image_token_id"], max_tokens, patch_dim, merge)
