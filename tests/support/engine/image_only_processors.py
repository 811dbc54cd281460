"""Processors of transformers without their part for videos, which needs torchvision."""

import sys
from typing import Any
from unittest.mock import patch

from transformers import ProcessorMixin
from transformers.models.pixtral import image_processing_pil_pixtral


def without_videos(kind: type[ProcessorMixin]) -> Any:
    """Returns a class of processors that are made without one for videos."""

    class WithoutVideos(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = kind.__name__  # as which it is saved
    return WithoutVideos


def pixtral_processor() -> Any:
    """Returns the class, whose module takes from that of torchvision what Pillow's has as well."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    with patch.dict(sys.modules, {name: image_processing_pil_pixtral}):
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

        return without_videos(PixtralProcessor)
