"""Image formats of all model families that take images, as their checkpoints describe them.

Knows nothing of torch. A family adds its format to `IMAGE_FORMATS` and to `read_image_format`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from baton.errors import UnsupportedModelError
from baton.models.images.fixed import FixedImages, GemmaImages, fixed, gemma
from baton.models.images.image_format import ImageFormat
from baton.models.images.patched import PatchedImages, patched
from baton.models.images.pixtral import TOWER, PixtralImages, pixtral
from baton.models.images.tiled import TiledImages, tiled

VISION_TOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    "llava": ("clip_vision_model", "siglip_vision_model", TOWER),
    "internvl": ("internvl_vision",),
    "mistral3": (TOWER,),
    "gemma3": ("siglip_vision_model",),
    "qwen2_5_vl": ("qwen2_5_vl_vision",),
    "qwen3_vl": ("qwen3_vl_vision",),
}
"""Vision towers of each model type that is implemented, by their own model types."""

IMAGE_FORMATS: Final[tuple[type[ImageFormat], ...]] = (
    FixedImages,
    GemmaImages,
    TiledImages,
    PixtralImages,
    PatchedImages,
)


def read_image_processor(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of a checkpoint's image processor; none without its file."""
    for name in "processor_config.json", "preprocessor_config.json":
        if (file := folder / name).is_file():
            settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            settings = settings.get("image_processor", settings)
            if "image_processor_type" in settings:
                return settings
    return {}


def read_image_format(
    config: Mapping[str, Any], processor: Mapping[str, Any] | None = None
) -> ImageFormat | None:
    """Returns the format of the images that a model takes; None: it takes none.

    Args:
        config: the content of its config.json, with every field that transformers would set.
        processor: settings of its image processor, which may bound the size of images.

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
    if model_type == "gemma3":
        return gemma(config, vision)
    if model_type in ("qwen2_5_vl", "qwen3_vl"):
        return patched(config, vision, processor or {})
    return fixed(config, vision)
