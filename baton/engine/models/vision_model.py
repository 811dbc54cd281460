"""Vision-language models of transformers, taken apart: the language model, which the engine runs as
any other, and the vision model, whose features it takes in place of embeddings.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from baton.encoder_input import TensorData
from baton.engine.device import is_out_of_memory
from baton.engine.models.hf import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from baton.errors import UnsupportedModelError
from baton.models.images import read_image_format


class VisionModel:
    """Vision tower and projector: pixels in, rows in place of the language model's embeddings out.

    Attributes:
        images: format of the images that it takes.
    """

    def __init__(self, model: PreTrainedModel, embeddings: torch.nn.Module) -> None:
        """Takes the base of a vision-language model, without its language model, of which it needs
        the embeddings alone. Raises `UnsupportedModelError` if its features do not have the shape
        that the configuration tells.
        """
        self._model = model
        self._embeddings = embeddings
        self.device: torch.device = model.device
        images = read_image_format(model.config.to_dict())
        assert images is not None
        blank = images.blank()
        try:
            with torch.inference_mode():
                features = self._features({name: tensor_of(data) for name, data in blank.items()})
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(
                f"the encoder of {type(model).__name__} fails for an image as the configuration "
                f"describes it: {error}"
            ) from error
        if len(features) != (expected := images.span(blank).count(images.placeholder_id)):
            raise UnsupportedModelError(
                f"the encoder returns {len(features)} features for an image; expected "
                f"{expected} by the configuration"
            )
        self.images = images

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], token_ids: SequenceOf[int]
    ) -> torch.Tensor:
        """Returns the rows of images, one after the other: `[num_tokens, hidden_size]`. The rows of
        placeholders are the encoder's features, those of other tokens their embeddings.

        Args:
            tensors: of all images, by the names of the model's processor; images come first in
                their shape.
            token_ids: of all images, as `images.span` has them.
        """
        features = self._features(tensors)
        if len(features) == len(token_ids):
            return features
        ids = torch.tensor(token_ids, device=self.device)
        rows: torch.Tensor = self._embeddings(ids)
        rows[ids == self.images.placeholder_id] = features
        return rows

    def _features(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        placed = {name: self._placed(tensor) for name, tensor in tensors.items()}
        features = self._model.get_image_features(**placed, return_dict=True).pooler_output
        return torch.cat([of_image.flatten(0, -2) for of_image in features])

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._model.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device, dtype, non_blocking=True)


def tensor_of(data: TensorData) -> torch.Tensor:
    """Returns plain data as a tensor."""
    dtype: torch.dtype = getattr(torch, data.dtype)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).reshape(data.shape)


def is_vision_language(config: PretrainedConfig) -> bool:
    """Returns whether this is the configuration of a vision-language model that is implemented.

    Raises `UnsupportedModelError` for one of these whose vision tower is not.
    """
    return read_image_format(config.to_dict()) is not None


def split(model: PreTrainedModel) -> tuple[PreTrainedModel, VisionModel]:
    """Returns the language model and the vision model. They take over the parts of `model`, which
    is unusable afterwards."""
    text_config = model.config.get_text_config()
    with torch.device("meta"):
        language: Any = AutoModelForCausalLM.from_config(text_config, trust_remote_code=False)
    setattr(language, language.base_model_prefix, model.get_decoder())
    language.set_output_embeddings(model.get_output_embeddings())
    language.generation_config = model.generation_config
    base = model.base_model
    base.set_decoder(torch.nn.Identity())  # its weights belong to the language model alone
    return language.eval().requires_grad_(False), VisionModel(base, language.get_input_embeddings())
