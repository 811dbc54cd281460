"""Loader of a checkpoint's processor of transformers without torch.

`AutoProcessor` loads no processor that also takes videos, nor Pixtral's: those parts import torch.
So the class is imported alone, and made of the tokenizer and of the image processor of Pillow.
"""

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models import checkpoint_folder, read_json

_CLASS_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(path: str) -> Any:
    """Returns the processor, of texts and images alone. Raises `UnsupportedModelError` if
    transformers has none for this checkpoint, and its own errors."""
    from transformers import AutoImageProcessor, AutoTokenizer

    kind = _processor_class(path)
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False, local_files_only=True
        ),
        "tokenizer": AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        ),
    }
    settings, _ = kind.get_processor_dict(path, local_files_only=True)
    attributes = kind.get_attributes()
    return kind.from_args_and_dict([parts.get(name) for name in attributes], settings)


def _processor_class(path: str) -> Any:
    """Returns the class of a processor that does without some of its parts."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    folder = checkpoint_folder(path, _CLASS_FILES)
    model_type = read_json(folder / "config.json").get("model_type", "")
    files = [read_json(folder / name) for name in _CLASS_FILES if (folder / name).is_file()]
    named = [file["processor_class"] for file in files if "processor_class" in file]
    name = next(iter(named), PROCESSOR_MAPPING_NAMES.get(model_type))
    for known_type, known_name in PROCESSOR_MAPPING_NAMES.items():
        if known_name == name:
            module_name = model_type_to_module_name(known_type)
            break
    else:
        raise UnsupportedModelError(f"transformers has no processor {name!r} for {model_type!r}")
    package = f"transformers.models.{module_name}"
    # Processors take functions from the module of torch that the one of Pillow has as well.
    pil = f"{package}.image_processing_pil_{module_name}"
    with suppress(ModuleNotFoundError):  # of a processor with the image processor of another model
        sys.modules[f"{package}.image_processing_{module_name}"] = import_module(pil)
    found: Any = getattr(import_module(f"{package}.processing_{module_name}"), str(name))

    class PartialProcessor(found):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    return PartialProcessor
