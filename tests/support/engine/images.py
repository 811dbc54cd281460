"""Small random vision-language checkpoints with their processors, images, and transformers'
answers."""

import random
from collections.abc import Callable, Sequence
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
    AutoProcessor,
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
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.support.engine.checkpoints import HIDDEN_SIZE, MAX_LEN, VOCAB_SIZE, randomize
from tests.support.engine.image_only_processors import pixtral_processor, without_videos
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
    return config, without_videos(InternVLProcessor)(images, tokenizer, image_seq_length=4)


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
    processor = pixtral_processor()(
        images,
        tokenizer,
        patch_size=_PATCH,
        spatial_merge_size=merge,
        image_token=IMAGE_TOKEN,
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    return made, processor


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


def _qwen(processor: Any, config: Any, vision: dict[str, Any], **text: Any) -> Any:
    """Returns a configuration and a processor of Qwen; images have 4 to 24 tokens."""
    tower = {
        "hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 4, "patch_size": 4,
        "out_hidden_size": HIDDEN_SIZE,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    made = config(
        vision_config={**tower, **vision},
        text_config={**_TEXT, "rope_parameters": rope, **text},
        image_token_id=PLACEHOLDER_ID,
        video_token_id=PLACEHOLDER_ID + 1,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 24 * 64}
    )
    return made, without_videos(processor)(
        images, _tokenizer(image_token=IMAGE_TOKEN, video_token="<video>")
    )


def _qwen2_5(**text: Any) -> Any:
    vision = {"window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(Qwen2_5_VLProcessor, Qwen2_5_VLConfig, vision, **text)


def _qwen3(**text: Any) -> Any:
    vision = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
    return _qwen(Qwen3VLProcessor, Qwen3VLConfig, vision, head_dim=16, **text)


# The last one runs as a model of transformers, the others in fused modules.
LLAVA = {
    "llava_clip": lambda: _clip(LlamaConfig(**_TEXT)),
    "llava_siglip": lambda: _siglip(Qwen2Config(**_TEXT)),
    "llava_clip_gelu": lambda: _clip(LlamaConfig(hidden_act="gelu", **_TEXT)),
}
QWEN = {
    "qwen2_5_vl": _qwen2_5,
    "qwen2_5_vl_gelu": lambda: _qwen2_5(hidden_act="gelu"),
    "qwen3_vl": _qwen3,
    "qwen3_vl_gelu": lambda: _qwen3(hidden_act="gelu"),
}
VISION_LANGUAGE: dict[str, Callable[[], Any]] = {
    **LLAVA,
    **QWEN,
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
_continued: dict[tuple[object, ...], tuple[int, ...]] = {}


def save_vision_language(name: str, folder: Path) -> None:
    """Writes a model with random weights, and its processor, to a folder."""
    torch.manual_seed(0)
    config, processor = VISION_LANGUAGE[name]()
    model = AutoModelForImageTextToText.from_config(config).float()
    randomize(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    _processors[str(folder)] = processor


def share_processor(folder: Path, *others: Path) -> None:
    """Lets `loaded` take the processor of a folder of `save_vision_language` for copies of it."""
    for other in others:
        _processors[str(other)] = _processors[str(folder)]


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
    """Returns the tokens by which transformers continues a prompt, none of them a toss-up.
    Remembers them, since many tests ask for the same."""
    key = (path, text, *((image.mode, image.size, image.tobytes()) for image in images), max_tokens)
    if key not in _continued:
        _continued[key] = _continuation(path, text, images, max_tokens)
    return _continued[key]


def _continuation(
    path: str, text: str, images: Sequence[Image.Image], max_tokens: int
) -> tuple[int, ...]:
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


def is_greedy(
    path: str, text: str, images: Sequence[Image.Image], token_ids: Sequence[int]
) -> bool:
    """Whether transformers continues a prompt with these tokens: each is its choice after those
    before it, and no toss-up. Two forward passes tell, since image tokens among them are no image.
    """
    model, processor = loaded(path)
    inputs = processor(text=text, images=list(images) or None, return_tensors="pt")
    answer = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        first = model(**inputs, use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"  # before transformers 5.24
        rest = model(input_ids=answer, **{name: first[name]})
    rows = torch.cat([first.logits[0, -1:], rest.logits[0, :-1]])
    return decided(rows[:, None], rows.argmax(-1)) == tuple(token_ids)


@cache
def loaded(path: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Returns a checkpoint's model and processor, as transformers loads them."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), _processors.get(path) or AutoProcessor.from_pretrained(path)
