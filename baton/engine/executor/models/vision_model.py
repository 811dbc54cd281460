"""Vision-language models of transformers, taken apart: the language model, which the engine runs as
any other, and the vision model, whose features it takes in place of embeddings.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from typing import Any

import torch

from baton.engine.executor.cache.kv_layout import KvShape
from baton.engine.executor.device import is_out_of_memory
from baton.engine.executor.models.hf import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from baton.errors import UnsupportedModelError
from baton.models.images.encoder_input import TensorData
from baton.models.images.families import read_image_format

# Language models that differ from a text model's only in their rotary positions.
_CAUSAL_TYPES = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


class VisionModel:
    """Vision tower and projector: pixels in, rows in place of the language model's embeddings out.

    Attributes:
        images: format of the images that it takes.
        hidden_size: width of the language model.
        shape: shape of its output for a token, as K of one head.
        dtype: dtype of its output.
    """

    def __init__(
        self, model: PreTrainedModel, embeddings: torch.nn.Module, processor: Mapping[str, Any]
    ) -> None:
        """Takes the base of a vision-language model, without its language model, and the settings
        of its image processor. Keeps none of the language model's `embeddings` but those of the
        tokens of text within images. Raises `UnsupportedModelError` if its features do not have the
        shape that the configuration tells.
        """
        self._model = model
        self.device: torch.device = model.device
        text_config = model.config.get_text_config()
        self.hidden_size: int = text_config.hidden_size
        images = read_image_format(model.config.to_dict(), processor)
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
        span = images.span(blank)
        if len(features) != (expected := span.count(images.placeholder_id)):
            raise UnsupportedModelError(
                f"the encoder returns {len(features)} features for an image; expected "
                f"{expected} by the configuration"
            )
        num_parts = features.shape[1] // self.hidden_size
        if num_parts > text_config.num_hidden_layers:
            raise UnsupportedModelError(
                f"the encoder returns features for {num_parts - 1} layers; expected fewer than the "
                f"{text_config.num_hidden_layers} of the language model"
            )
        ids = sorted(set(span) - {images.placeholder_id})
        self._text_ids = torch.tensor(ids, dtype=torch.int64, device=self.device)
        self._text_rows: torch.Tensor = embeddings(self._text_ids)
        self.images = images
        self.shape = KvShape(num_kv_heads=1, key_head_dim=features.shape[1], value_head_dim=0)
        self.dtype: torch.dtype = features.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of its output for a token."""
        return self.shape.key_head_dim * self.dtype.itemsize

    def encode_blank(self, num_tokens: int) -> torch.Tensor:
        """Encodes images of at most `num_tokens` tokens together, for a measurement. Returns their
        rows."""
        blank = self.images.blank()
        token_ids = self.images.span(blank)
        count = max(1, num_tokens // len(token_ids))
        tensors = {name: torch.cat([tensor_of(data)] * count) for name, data in blank.items()}
        return self(tensors, [*token_ids] * count)

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], token_ids: SequenceOf[int]
    ) -> torch.Tensor:
        """Returns the rows of images, one after the other: `[num_tokens, hidden_size]`, or with
        what the first layers add beside it (deepstack): `[num_tokens, (1 + num_layers) *
        hidden_size]`. The rows of placeholders are the encoder's features, those of other tokens
        their embeddings.

        Args:
            tensors: of all images, by the names of the model's processor; images, or the patches
                of all, come first in their shape.
            token_ids: of all images, as `images.span` has them.
        """
        features = self._features(tensors)
        if len(features) == len(token_ids):
            return features
        ids = torch.tensor(token_ids, device=self.device)
        places = torch.searchsorted(self._text_ids, ids) % len(self._text_ids)
        rows = self._text_rows[places]
        rows[ids == self.images.placeholder_id] = features
        return rows

    def _features(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        placed = {name: self._placed(tensor) for name, tensor in tensors.items()}
        found = self._model.get_image_features(**placed, return_dict=True)
        parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return torch.cat([torch.cat([i.flatten(0, -2) for i in part]) for part in parts], dim=1)

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


def without_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration of a vision-language model whose language model has no layers, so
    that transformers reads no weights of theirs."""
    config = deepcopy(config)
    text_config: Any = config.get_text_config()
    text_config.num_hidden_layers = 0
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = []
    return config


def with_meta_decoder(
    encoder: PreTrainedModel, config: PretrainedConfig, attention: Mapping[str, str]
) -> PreTrainedModel:
    """Returns the vision-language model of `config`, of which `encoder`, loaded `without_layers`,
    becomes the base. Its language model is on the meta device, but for its embeddings: it has
    shapes and no memory.

    Args:
        attention: attention implementations by the names of the configurations.
    """
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(
            deepcopy(config),  # on which transformers notes the dtype
            dtype=encoder.dtype,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    decoder = model.get_decoder()
    decoder.set_input_embeddings(encoder.get_input_embeddings())
    encoder.config = model.config
    encoder.set_decoder(decoder)
    setattr(model, model.base_model_prefix, encoder)
    return model.eval().requires_grad_(False)


def split(
    model: PreTrainedModel, processor: Mapping[str, Any]
) -> tuple[PreTrainedModel, VisionModel]:
    """Returns the language model and the vision model. They take over the parts of `model`, which
    is unusable afterwards.

    Args:
        processor: settings of its image processor.
    """
    text_config = model.config.get_text_config()
    with torch.device("meta"):
        language: Any = AutoModelForCausalLM.from_config(
            _causal_config(text_config), trust_remote_code=False
        )
    language.config = text_config
    setattr(language, language.base_model_prefix, model.get_decoder())
    language.set_output_embeddings(model.get_output_embeddings())
    language.generation_config = model.generation_config
    base = model.base_model
    base.set_decoder(torch.nn.Identity())  # its weights belong to the language model alone
    embeddings = language.get_input_embeddings()
    return language.eval().requires_grad_(False), VisionModel(base, embeddings, processor)


def _causal_config(text_config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration of the causal language model that has a text configuration's
    decoder."""
    model_type = _CAUSAL_TYPES.get(text_config.model_type)
    if model_type is None:
        return text_config
    sizes = {name: getattr(text_config, name) for name in ("vocab_size", "hidden_size")}
    return AutoConfig.for_model(model_type, **sizes, num_hidden_layers=1)  # only its class counts
