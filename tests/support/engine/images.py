"""Small random LLaVA checkpoints with their processors, images, and transformers' answers."""

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
    AutoProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
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
    words = {f"w{i}": i for i in range(PLACEHOLDER_ID)}
    tokenizer = Tokenizer(WordLevel({**words, IMAGE_TOKEN: PLACEHOLDER_ID}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([IMAGE_TOKEN])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens={"image_token": IMAGE_TOKEN}
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=_PATCH,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=num_additional_image_tokens,
    )


# The last one runs as a model of transformers, the others in fused modules.
LLAVA = {
    "llava_clip": lambda: _clip(LlamaConfig(**_TEXT)),
    "llava_siglip": lambda: _siglip(Qwen2Config(**_TEXT)),
    "llava_clip_gelu": lambda: _clip(LlamaConfig(hidden_act="gelu", **_TEXT)),
}


def save_llava(name: str, folder: Path) -> None:
    """Writes a model with random weights, and its processor, to a folder."""
    torch.manual_seed(0)
    config, processor = LLAVA[name]()
    model = LlavaForConditionalGeneration(config).float()
    randomize(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@cache
def image(seed: int) -> Image.Image:
    """Returns an image of random pixels, of a size that the processor changes."""
    source = np.random.default_rng(seed)
    height, width = source.integers(20, 60, 2)
    return Image.fromarray(source.integers(0, 256, (height, width, 3), np.uint8))


def words(count: int, seed: int) -> str:
    source = random.Random(f"{count} {seed}")
    return " ".join(f"w{source.randrange(5, PLACEHOLDER_ID)}" for _ in range(count))


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
def loaded(path: str) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Returns a checkpoint's model and processor, as transformers loads them."""
    model = LlavaForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoProcessor.from_pretrained(path)
