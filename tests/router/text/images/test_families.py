"""Expansion and tensors of families of models, against transformers' own processors."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    Gemma3Processor,
    InternVLProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.context_length import ContextLength
from baton.v1 import inference_pb2 as pb
from baton_router.text.images.expansion import expand_text, placeholders
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_messages import PreprocessedImage, Ready
from baton_router.text.images.image_pool import ImagePool
from tests.support.engine.checkpoints import MAX_LEN
from tests.support.engine.engines import load
from tests.support.engine.image_only_processors import pixtral_processor, without_videos
from tests.support.engine.images import IMAGE_TOKEN, VISION_LANGUAGE, image, save_vision_language
from tests.support.router.calls import call_of
from tests.support.router.images import encoded, running_intake

SEEDS = (1, 2, 3)


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = [f"w{i}" for i in range(9)] + [" ", "\n\n", "\n", *special.values()]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = Split(" ", "isolated")
    made.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=special)


def gemma3() -> ProcessorMixin:
    special = tokenizer(
        image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
    )
    images = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    return Gemma3Processor(images, special, image_seq_length=9)


def pixtral() -> ProcessorMixin:
    special = tokenizer(
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
    )
    images = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size=6)
    return pixtral_processor()(
        images, special, patch_size=6, spatial_merge_size=2,
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
    )  # fmt: skip


def qwen2_5_vl() -> ProcessorMixin:
    special = tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2048}
    )
    return without_videos(Qwen2_5_VLProcessor)(images, special)


def internvl() -> ProcessorMixin:
    special = tokenizer(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>",
        video_token="<video>",
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, max_patches=4)
    return without_videos(InternVLProcessor)(images, special, image_seq_length=4)


FAMILIES: dict[str, tuple[Callable[[], ProcessorMixin], str]] = {
    "gemma3": (gemma3, "Gemma3Processor"),
    "mistral3": (pixtral, "PixtralProcessor"),
    "qwen2_5_vl": (qwen2_5_vl, "Qwen2_5_VLProcessor"),
    "internvl": (internvl, "InternVLProcessor"),
}


def save(processor: ProcessorMixin, model_type: str, name: str, folder: Path) -> None:
    """Writes the files of a processor as checkpoints have them."""
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    names = ("image_seq_length", "patch_size", "spatial_merge_size", "image_token",
             "image_break_token", "image_end_token")  # fmt: skip
    is_own = model_type in ("mistral3", "gemma3", "internvl")
    settings = {n: getattr(processor, n) for n in names if is_own and hasattr(processor, n)}
    if model_type != "mistral3":
        settings.pop("image_token", None)
    content = {"processor_class": name, **settings}
    (folder / "processor_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


async def processed(folder: Path) -> tuple[Ready, list[PreprocessedImage]]:
    pool = ImagePool(str(folder), ImageLimits(), 1)
    try:
        facts = await pool.start()
        done = []
        for seed in SEEDS:
            file = io.BytesIO()
            image(seed).save(file, "PNG")
            done += await pool.process(file.getvalue())
        return facts, done
    finally:
        await pool.close()


def values(done: PreprocessedImage, name: str) -> Any:
    tensor = done.tensors[name]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("model_type", FAMILIES)
async def test_family_expands_as_its_processor(model_type, tmp_path):
    make, name = FAMILIES[model_type]
    processor = make()
    save(processor, model_type, name, tmp_path)
    facts, done = await processed(tmp_path)
    assert facts.placeholder == processor.image_token
    text = f" {facts.placeholder} ".join(["w1 w2", "w3", "w4", "w5"])
    pictures: list[Image.Image] = [image(seed) for seed in SEEDS]
    given = processor(text=[text], images=pictures, return_tensors=None)
    expanded, _ = expand_text(
        text,
        facts.placeholder,
        placeholders(text, facts.placeholder),
        [each.replacement for each in done],
        (),
    )
    assert processor.tokenizer(expanded)["input_ids"] == given["input_ids"][0]
    for each, picture in zip(done, pictures, strict=True):
        alone = processor(text=[facts.placeholder], images=[picture], return_tensors="np")
        assert {"pixel_values"} <= each.tensors.keys() <= alone.keys()
        for name in each.tensors:
            assert np.array_equal(values(each, name), alone[name]), name


# Those of LLaVA are compared in `test_prompt_images.py`.
@pytest.mark.parametrize(
    "name",
    [n for n in VISION_LANGUAGE if "gelu" not in n and n not in ("llava_clip", "llava_siglip")],
)
async def test_router_and_engine_make_equal_prompts(name, tmp_path):
    save_vision_language(name, tmp_path)
    text = f"w5 {IMAGE_TOKEN} w6 w7 {IMAGE_TOKEN} w8"
    pictures = [image(seed) for seed in (1, 2)]
    prompt = load(str(tmp_path)).prompt_with_images(text, pictures)
    files = [pb.Image(data=encoded(picture)) for picture in pictures]
    async with running_intake(str(tmp_path)) as intake:
        request = await intake.read(
            call_of(pb.GenerateRequest(text=text, images=files)), ContextLength(MAX_LEN)
        )
    assert request.token_ids == tuple(prompt.token_ids)
    assert request.encoder_inputs == prompt.encoder_inputs  # hashes and spans
    tensors = [each.tensors for each in prompt.encoder_inputs]
    assert [each.tensors for each in request.encoder_inputs] == tensors
