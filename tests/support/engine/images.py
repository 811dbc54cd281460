"""Small random vision-language checkpoints with their processors, images, and transformers'
answers."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3Processor,
    Gemma3TextConfig,
    GenerationConfig,
    InternVLConfig,
    InternVLProcessor,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.support.engine.checkpoints import HIDDEN_SIZE, MAX_LEN, VOCAB_SIZE, randomize
from tests.support.engine.oracle import decided

IMAGE_TOKEN = "<image>"
PLACEHOLDER_ID = 500
TOKENS_PER_IMAGE = 16
_SIDE, _PATCH = 24, 6
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": _SIDE, "patch_size": _PATCH,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def _clip(text: PretrainedConfig) -> tuple[LlavaConfig, LlavaProcessor]:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(projection_dim=32, **_TOWER),
        text_config=text,
        image_token_id=PLACEHOLDER_ID,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
    )
    return config, _processor(images, num_additional_image_tokens=1, strategy="default")


def _siglip(text: PretrainedConfig) -> tuple[LlavaConfig, LlavaProcessor]:
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(vision_use_head=False, **_TOWER),
        text_config=text,
        image_token_id=PLACEHOLDER_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = SiglipImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    return config, _processor(images, num_additional_image_tokens=0, strategy="full")


def _processor(images: Any, *, num_additional_image_tokens: int, strategy: str) -> LlavaProcessor:
    return LlavaProcessor(
        image_processor=images,
        tokenizer=_tokenizer(image_token=IMAGE_TOKEN),
        patch_size=_PATCH,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=num_additional_image_tokens,
    )


def _tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words; these special tokens, by their names, begin at the placeholder,
    which is the first."""
    words = {f"w{i}": i for i in range(PLACEHOLDER_ID)}
    tokens = {token: PLACEHOLDER_ID + i for i, token in enumerate(special.values())}
    tokenizer = Tokenizer(WordLevel({**words, **tokens}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special)


class _InternVLProcessor(InternVLProcessor):  # type: ignore[misc]
    """Processor of InternVL without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument is not None:
            super().check_argument_for_proper_class(argument_name, argument)


def _internvl(text: PretrainedConfig) -> tuple[InternVLConfig, InternVLProcessor]:
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(
            **{**_TOWER, "image_size": [_SIDE] * 2, "patch_size": [_PATCH] * 2}
        ),
        text_config=text,
        image_token_id=PLACEHOLDER_ID,
        image_seq_length=4,
    )
    tokenizer = _tokenizer(
        context_image_token=IMAGE_TOKEN, start_image_token="<img>", end_image_token="</img>",
        video_token="<video>",
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(size={"height": _SIDE, "width": _SIDE}, max_patches=4)
    return config, _InternVLProcessor(images, tokenizer, image_seq_length=4)


class _PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """Processor as transformers' PixtralProcessor, which needs torchvision to be imported."""

    def __init__(self, image_processor: Any, tokenizer: Any, square: int = 0) -> None:
        super().__init__(image_processor, tokenizer)
        self.square = square
        self.image_token, self.image_token_id = IMAGE_TOKEN, PLACEHOLDER_ID

    @property
    def image_token_ids(self) -> list[int]:
        return [PLACEHOLDER_ID, PLACEHOLDER_ID + 1, PLACEHOLDER_ID + 2]

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self.square})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        height, width = (int(n) // self.square for n in image_inputs["image_sizes"][image_idx])
        row = IMAGE_TOKEN * width
        return "[IMG_BREAK]".join([row] * height) + "[IMG_END]"


def _pixtral(
    config: type[PretrainedConfig], text: PretrainedConfig, merge: int, **changes: Any
) -> tuple[PretrainedConfig, ProcessorMixin]:
    side = 4 * merge * _PATCH
    made = config(
        vision_config=PixtralVisionConfig(**{**_TOWER, "image_size": side}),
        text_config=text,
        image_token_index=PLACEHOLDER_ID,
        vision_feature_layer=-1,
        **changes,
    )
    tokenizer = _tokenizer(
        image_token=IMAGE_TOKEN, image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
    )
    images = PixtralImageProcessorPil(size={"longest_edge": side}, patch_size=_PATCH)
    return made, _PixtralProcessor(images, tokenizer, merge * _PATCH)


def _gemma(text: PretrainedConfig) -> tuple[Gemma3Config, Gemma3Processor]:
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(vision_use_head=False, **{**_TOWER, "patch_size": 4}),
        text_config=text,
        mm_tokens_per_image=9,
        image_token_index=PLACEHOLDER_ID,
        boi_token_index=PLACEHOLDER_ID + 1,
        eoi_token_index=PLACEHOLDER_ID + 2,
        tie_word_embeddings=False,
    )
    tokenizer = _tokenizer(
        image_token="<image_soft_token>", boi_token=IMAGE_TOKEN, eoi_token="<end_of_image>"
    )
    images = Gemma3ImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    return config, Gemma3Processor(images, tokenizer, image_seq_length=9)


# The last one runs as a model of transformers, the others in fused modules.
LLAVA = {
    "llava_clip": lambda: _clip(LlamaConfig(**_TEXT)),
    "llava_siglip": lambda: _siglip(Qwen2Config(**_TEXT)),
    "llava_clip_gelu": lambda: _clip(LlamaConfig(hidden_act="gelu", **_TEXT)),
}
VISION_LANGUAGE = {
    **LLAVA,
    "internvl": lambda: _internvl(Qwen2Config(**_TEXT)),
    "llava_pixtral": lambda: _pixtral(
        LlavaConfig, MistralConfig(**_TEXT), 1, vision_feature_select_strategy="full"
    ),
    "mistral3": lambda: _pixtral(
        Mistral3Config, MistralConfig(sliding_window=None, **_TEXT), 2, spatial_merge_size=2
    ),
    "gemma3": lambda: _gemma(
        Gemma3TextConfig(
            **_TEXT,
            head_dim=64,
            sliding_window=7,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}
# Processors by the folders of their checkpoints: some cannot be loaded without torchvision.
_processors: dict[str, ProcessorMixin] = {}


def save_vision_language(name: str, folder: Path) -> None:
    """Writes a model with random weights, and its processor, to a folder."""
    torch.manual_seed(0)
    config, processor = VISION_LANGUAGE[name]()
    model = AutoModelForImageTextToText.from_config(config).float()
    randomize(model)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    _processors[str(folder)] = processor


@cache
def image(seed: int) -> Image.Image:
    """Returns an image of random pixels, of a size that the processor changes."""
    source = np.random.default_rng(seed)
    height, width = source.integers(20, 60, 2)
    return Image.fromarray(source.integers(0, 256, (height, width, 3), np.uint8))


def words(count: int, seed: int) -> str:
    source = random.Random(f"{count} {seed}")
    return " ".join(f"w{source.randrange(5, PLACEHOLDER_ID)}" for _ in range(count))


def prompt_ids(path: str, text: str, images: Sequence[Image.Image]) -> tuple[int, ...]:
    """Returns the tokens of a prompt by transformers' processor."""
    processor = loaded(path)[1]
    inputs = processor(text=text, images=list(images) or None, return_tensors="pt")
    return tuple(inputs["input_ids"][0].tolist())


def greedy(path: str, text: str, images: Sequence[Image.Image], max_tokens: int) -> tuple[int, ...]:
    """Returns the tokens by which transformers continues a prompt, none of them a toss-up."""
    model, processor = loaded(path)
    inputs = processor(text=text, images=list(images) or None, return_tensors="pt")
    out = model.generate(
        **inputs,
        generation_config=GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    return decided(out.logits, out.sequences[0, inputs["input_ids"].shape[1] :])


@cache
def loaded(path: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Returns a checkpoint's model and processor, as transformers loads them."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), _processors[path]
