"""Images of many sizes, as Pixtral's vision tower takes them: a token for each patch or square of
patches, and a token of text after each row.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.models.images.encoder_input import TensorData
from baton.models.images.image_format import ImageFormat
from baton.models.images.image_tensors import PIXEL_VALUES, blank_pixels, check_tensors

TOWER: Final = "pixtral"
IMAGE_SIZES: Final = "image_sizes"
"""Name under which processors return height and width of an image, in pixels."""

# Tokens of text in an image: fields of the configuration, and tokens by Mistral's tokenizers.
_TEXT_TOKENS = {"image_break_token_id": "[IMG_BREAK]", "image_end_token_id": "[IMG_END]"}
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class PixtralImages(ImageFormat):
    """Images of many sizes, in rows of tokens.

    Attributes:
        placeholder_id: the token that stands for each square of an image.
        max_tokens: tokens of the largest image.
        break_id: token of text after each row but the last.
        end_id: token of text after the last row.
        channels: of the pixels.
        square: pixels of a square's side.
        max_side: most pixels of an image's side.
    """

    placeholder_id: int
    max_tokens: int
    break_id: int
    end_id: int
    channels: int
    square: int
    max_side: int
    kind: str = field(default="PixtralImages", init=False)

    @property
    def options(self) -> Mapping[str, Any]:
        return {"patch_size": self.square}

    def split(self, processed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        sizes = processed[IMAGE_SIZES]
        for i, (pixels, (height, width)) in enumerate(
            zip(processed[PIXEL_VALUES], sizes.tolist(), strict=True)
        ):
            # Without the padding to the largest image of the prompt.
            yield {PIXEL_VALUES: pixels[None, :, :height, :width], IMAGE_SIZES: sizes[i : i + 1]}

    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        pixels = tensors.get(PIXEL_VALUES)
        height, width = pixels.shape[-2:] if pixels and len(pixels.shape) > 1 else (0, 0)
        shape = (1, self.channels, height, width)
        check_tensors(tensors, {PIXEL_VALUES: ("float32", shape), IMAGE_SIZES: ("int64", (1, 2))})
        if (size := struct.unpack("<2q", tensors[IMAGE_SIZES].data)) != (height, width):
            raise InvalidArgumentError(
                f"tensors[{IMAGE_SIZES!r}]", f"is {size}; the image has {height}x{width} pixels"
            )
        for side in height, width:
            if not self.square <= side <= self.max_side or side % self.square:
                raise InvalidArgumentError(
                    f"tensors[{PIXEL_VALUES!r}]",
                    f"has {height}x{width} pixels; expected multiples of {self.square} up to "
                    f"{self.max_side}",
                )
        if height == width == self.square:  # transformers fails for a single feature
            raise InvalidArgumentError(
                f"tensors[{PIXEL_VALUES!r}]",
                f"has {height}x{width} pixels, for one token; expected two tokens or more",
            )
        row = (self.placeholder_id,) * (width // self.square) + (self.break_id,)
        return (*(row * (height // self.square))[:-1], self.end_id)

    def blank(self) -> dict[str, TensorData]:
        height = width = 2 * self.square  # two rows, of which the first has a break
        return {
            PIXEL_VALUES: blank_pixels((1, self.channels, height, width)),
            IMAGE_SIZES: TensorData("int64", (1, 2), struct.pack("<2q", height, width)),
        }


def pixtral(config: Mapping[str, Any], vision: Mapping[str, Any]) -> PixtralImages:
    """Returns the format of a model with Pixtral's tower, whose configuration has the fields of
    `text_tokens`. Raises `UnsupportedModelError` without them, and for a LLaVA that drops a token
    of each image."""
    if missing := [token for name, token in _TEXT_TOKENS.items() if config.get(name) is None]:
        raise UnsupportedModelError(
            f"{_TOKENIZER} lacks {' and '.join(missing)}, which stand between the rows of an image"
        )
    if (strategy := config.get("vision_feature_select_strategy", "full")) != "full":
        raise UnsupportedModelError(
            f"the vision_feature_select_strategy of this {config['model_type']} is {strategy}; "
            f"implemented with {TOWER} is full"
        )
    square = vision["patch_size"] * config.get("spatial_merge_size", 1)
    side = vision["image_size"] // square
    break_id, end_id = (config[name] for name in _TEXT_TOKENS)
    return PixtralImages(
        config["image_token_index"],
        side * (side + 1),
        break_id,
        end_id,
        vision["num_channels"],
        square,
        side * square,
    )


def text_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the tokens of text within images by the fields of a configuration that `pixtral`
    reads, from the checkpoint's tokenizer: only that has them. Empty for other models."""
    file = folder / _TOKENIZER
    if (config.get("vision_config") or {}).get("model_type") != TOWER or not file.is_file():
        return {}
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    return {name: ids[token] for name, token in _TEXT_TOKENS.items() if token in ids}
