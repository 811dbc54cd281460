"""Prompts with images: tokens equal to transformers', however the prompt is computed."""

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import load as load_model
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.vision.encoder_limits import encoder_limits, tokens_with_decodes
from baton.engine.executor.vision.rope_positions import RopePositions
from baton.engine.executor.vision.vision_encoder import VisionEncoder
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, KvSource, MultimodalPrompt
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.errors import FailedPreconditionError, InvalidArgumentError, UnsupportedModelError
from baton.models.images.encoder_input import EncoderInput, TensorData, content_hash
from baton.models.images.fixed import GemmaImages
from baton.models.images.patched import PatchedImages
from baton.models.images.pixtral import PixtralImages
from baton.models.images.tiled import TiledImages
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, load, mostly_slow, tokens
from tests.support.engine.images import (
    IMAGE_TOKEN,
    PLACEHOLDER_ID,
    QWEN,
    TOKENS_PER_IMAGE,
    VISION_LANGUAGE,
    greedy,
    image,
    prompt_ids,
    save_vision_language,
    words,
)
from tests.support.engine.recorded_steps import CountedGraphs
from tests.support.engine.streams import read
from tests.support.grids import grid

NUM_TOKENS = 10
# One model of each image format in the short run of the tests.
FAMILIES = ("llava_clip", "internvl", "mistral3", "gemma3", "qwen2_5_vl", "qwen3_vl")
MOSTLY_SLOW = mostly_slow(VISION_LANGUAGE, *FAMILIES)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
GEMMA_TOKENS = 9  # of an image
Checkpoint = Callable[[str], str]
Given = tuple[str, tuple[Image.Image, ...]]

# Images in the middle, at both ends, side by side, twice the same, and none.
PROMPTS: list[Given] = [
    (f"{words(7, 1)} {IMAGE_TOKEN} {words(5, 2)}", (image(1),)),
    (f"{IMAGE_TOKEN} {words(9, 3)} {IMAGE_TOKEN} {words(3, 4)}", (image(1), image(2))),
    (f"{words(3, 5)} {IMAGE_TOKEN}", (image(3),)),
    (f"{IMAGE_TOKEN} {IMAGE_TOKEN} {words(2, 6)}", (image(4), image(5))),
    (f"{words(4, 7)} {IMAGE_TOKEN} {words(1, 8)} {IMAGE_TOKEN} {words(6, 9)}", (image(6),) * 2),
    (words(21, 10), ()),
]


def prompts_for(name: str) -> list[Given]:
    """Returns the prompts for a checkpoint; transformers takes images of Qwen for one unless text
    is between them, as its chat template has."""
    if name not in QWEN:
        return PROMPTS
    return [(text.replace(IMAGE_TOKEN, f"w3 {IMAGE_TOKEN} w4"), images) for text, images in PROMPTS]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_vision_language(name, folder)
            made[name] = str(folder)
        return made[name]

    return make


class CountingEncoder:
    """Vision encoder that notes the number of images of each of its calls."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self._encoder = encoder
        self.calls: list[int] = []

    def encode(self, outputs: Sequence[EncoderOutput]) -> None:
        self.calls.append(len(outputs))
        self._encoder.encode(outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)


def counted(path: str, **changes: Any) -> tuple[LLM, CountingEncoder]:
    """Returns an engine and its encoder."""
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 96, "free_block_margin": 0.0}
    config = EngineConfig(**{**settings, **changes})
    loaded = load_model(path, config, lambda _phase, _fraction: None)
    assert loaded.encoder is not None
    counting = CountingEncoder(loaded.encoder)
    return LLM(EngineCore(config, replace(loaded, encoder=counting))), counting  # type: ignore[arg-type]


@cache
def loaded(path: str) -> LLM:
    """Returns an engine whose prompts and properties tests read; none of them runs it."""
    return load(path)


def max_tokens(path: str) -> int:
    """Returns the tokens of a model's largest image, at least those of two that are given."""
    images = loaded(path).core.facts.info.images
    assert images is not None
    return max(2 * TOKENS_PER_IMAGE, images.max_tokens)


def prompts_of(engine: LLM, given: Sequence[Given]) -> list[MultimodalPrompt]:
    return [engine.prompt_with_images(text, images) for text, images in given]


def expected(path: str, given: Sequence[Given] = PROMPTS) -> list[tuple[int, ...]]:
    return [greedy(path, text, images, NUM_TOKENS) for text, images in given]


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_prompt_has_the_tokens_of_transformers_processor(checkpoint, name):
    path = checkpoint(name)
    given = [*PROMPTS, (f"w1{IMAGE_TOKEN}{IMAGE_TOKEN}w2", (image(7), image(8)))]
    made = [tuple(prompt.token_ids) for prompt in prompts_of(loaded(path), given)]
    assert made == [prompt_ids(path, text, images) for text, images in given]


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_prompts_with_images_answer_as_transformers_alone(checkpoint, name):
    path, given = checkpoint(name), prompts_for(name)
    engine = load(path, prefix_caching=False)
    said = [tokens(engine.generate([p], GREEDY))[0] for p in prompts_of(engine, given)]
    assert said == expected(path, given)
    assert_idle(engine)


@grid(name=MOSTLY_SLOW, num_batched=[7, 13, 24, 512], block_size=[4, 16])
def test_images_change_no_token_in_batches_and_chunks(checkpoint, name, num_batched, block_size):
    path, given = checkpoint(name), prompts_for(name)
    if name == "gemma3":
        num_batched = max(num_batched, GEMMA_TOKENS + 5)  # beside 5 decodes
    engine = load(path, max_num_batched_tokens=num_batched, max_num_seqs=6, block_size=block_size)
    prompts = prompts_of(engine, given)
    assert tokens(engine.generate(prompts, GREEDY)) == expected(path, given)
    assert tokens(engine.generate(prompts, GREEDY)) == expected(path, given)  # from the cache
    assert_idle(engine)


# What is swapped is blocks, whichever model's they are; recomputed are images, by their model.
SWAPPED = ("llava_clip", "qwen2_5_vl", "gemma3")
PREEMPTED = [
    *((name, "recompute") for name in VISION_LANGUAGE),
    *((name, "swap") for name in SWAPPED),
    *(
        pytest.param(n, "swap", marks=pytest.mark.nightly)
        for n in VISION_LANGUAGE
        if n not in SWAPPED
    ),
]


@pytest.mark.parametrize(("name", "preemption"), PREEMPTED)
def test_preemption_changes_no_token_after_images(checkpoint, name, preemption):
    path, given = checkpoint(name), prompts_for(name)
    tight = {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    engine = load(
        path, **tight, preemption=preemption, swap_bytes=2**20, prefix_caching=False,
        encoder_cache_tokens=max_tokens(path),
    )  # fmt: skip
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)
    assert engine.core.scheduler.stats().num_preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_equal_images_hit_the_prefix_cache_and_others_do_not(checkpoint, name):
    path = checkpoint(name)
    engine = load(path, block_size=4)
    text = f"{words(5, 1)} {IMAGE_TOKEN} {words(7, 2)}"
    other = image(2).resize(image(1).size)
    given: list[Given] = [(text, (each,)) for each in (image(1), image(1), other)]
    results = [engine.generate([p], GREEDY)[0] for p in prompts_of(engine, given)]
    assert results[2].prompt_token_ids == results[0].prompt_token_ids
    num_tokens = len(results[0].prompt_token_ids)
    all_but_last = min(num_tokens // 4 * 4, num_tokens - 1)
    assert [r.num_cached_tokens for r in results] == [0, all_but_last, 4]
    assert tokens(results) == expected(path, given)
    assert results[2].token_ids != results[0].token_ids


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_encoder_computes_only_the_image_that_is_not_cached(checkpoint, name):
    path = checkpoint(name)
    engine, encoder = counted(path)
    given: list[Given] = [
        (f"{words(4, 1)} {IMAGE_TOKEN} {words(3, 2)}", (image(1),)),
        (f"{words(6, 3)} {IMAGE_TOKEN} {words(2, 4)} {IMAGE_TOKEN} w9", (image(2), image(1))),
    ]
    for prompt, answer in zip(prompts_of(engine, given), expected(path, given), strict=True):
        assert tokens(engine.generate([prompt], GREEDY)) == [answer]
    assert encoder.calls == [1, 1]


def test_encoder_batches_images_of_several_requests(checkpoint):
    path = checkpoint("llava_siglip")
    engine, encoder = counted(path, max_num_batched_tokens=512)
    given = [(f"w{seed} {IMAGE_TOKEN} {words(3, seed)}", (image(seed),)) for seed in range(5)]
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)
    assert encoder.calls == [5]


def test_encoder_budget_spreads_images_over_steps(checkpoint):
    path = checkpoint("llava_siglip")
    engine, encoder = counted(
        path, encoder_budget=2 * TOKENS_PER_IMAGE, encoder_cache_tokens=2 * TOKENS_PER_IMAGE
    )
    given = [(f"w{seed} {IMAGE_TOKEN} {words(3, seed)}", (image(seed),)) for seed in range(5)]
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)
    assert encoder.calls == [2, 2, 1]


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_steps_launched_ahead_change_no_token_after_images(checkpoint, name):
    path, given = checkpoint(name), prompts_for(name)
    engine = load(path, async_scheduling=True, max_num_batched_tokens=24, max_num_seqs=6)
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)
    assert engine.core.scheduler.stats().num_steps_ahead > 0


@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_drafts_after_an_image_change_no_token(checkpoint, name):
    path, given = checkpoint(name), prompts_for(name)
    engine = load(path, max_drafts=3)
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("name", mostly_slow(VISION_LANGUAGE, *FAMILIES, "qwen2_5_vl_gelu"))
def test_recorded_steps_change_no_token_after_images(checkpoint, name, max_drafts):
    path, given = checkpoint(name), prompts_for(name)
    engine = load(path, max_num_seqs=6, max_drafts=max_drafts)
    graphs = CountedGraphs(engine)
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)
    text = given[-1:]
    assert tokens(engine.generate(prompts_of(engine, text), GREEDY)) == expected(path, text)
    assert graphs.num_steps > 0
    repeats = name not in ("gemma3", "llava_siglip")  # in whose answers no word comes again
    assert (graphs.num_with_drafts > 0) == (max_drafts > 0 and repeats)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])  # of one group
def test_kv_of_images_continues_in_another_engine(checkpoint, name):
    path = checkpoint(name)
    given = prompts_for(name)[1:2]
    prefill, decode = load(path), load(path)
    CountedGraphs(decode)
    (prompt,) = prompts_of(prefill, given)
    ids = tuple(prompt.token_ids)
    request = EngineRequest("x", ids, GREEDY, len(ids), encoder_inputs=prompt.encoder_inputs)
    prefill.core.add(request)
    (first,) = prefill.core.step().updates
    (slot,) = [i for i, owner in enumerate(prefill.core.scheduler.batch_slots.owners) if owner]
    table = prefill.core.scheduler.batch_slots.block_tables[0][slot]
    decode.core.add(replace(request, kv_source=KvSource.EXTERNAL))
    (allocation,) = decode.core.step().external
    (blocks,) = allocation.block_ids
    sources, targets = prefill.core.runner._cache.pools, decode.core.runner._cache.pools
    targets[0].copy_blocks(table[: len(blocks)].tolist(), list(blocks), sources[0])
    decode.core.scheduler.commit_external("x", first.token_id)
    said = [first.token_id]
    while decode.core.has_work:
        said += [u.token_id for u in decode.core.step().updates]
    assert [tuple(said)] == expected(path, given)
    assert_idle(decode)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_samples_fork_after_images(checkpoint, name):
    path, given = checkpoint(name), prompts_for(name)
    engine = load(path, max_num_seqs=8, max_num_batched_tokens=32)
    params = replace(GREEDY, n=3, temperature=1.0, top_k=1)
    results = engine.generate(prompts_of(engine, given), params)
    assert [[c.token_ids for c in r.completions] for r in results] == [
        [answer] * 3 for answer in expected(path, given)
    ]


def test_recorded_steps_fill_no_placeholder(checkpoint):
    """One token of the prompt that ends in an image is left for a step of its own."""
    path = checkpoint("llava_clip")
    engine = load(
        path, max_num_batched_tokens=TOKENS_PER_IMAGE + 2, max_num_seqs=6, prefix_caching=False
    )
    CountedGraphs(engine)
    given = [(f"{words(3, 5)} {IMAGE_TOKEN}", (image(3),))]
    assert tokens(engine.generate(prompts_of(engine, given), GREEDY)) == expected(path, given)


@pytest.mark.parametrize(
    ("serve", "name"),
    [
        ("thread", "llava_clip"),
        *(
            pytest.param("process", name, marks=() if name in FAMILIES else pytest.mark.slow)
            for name in VISION_LANGUAGE
        ),
    ],
    indirect=["serve"],
)
async def test_engine_core_takes_images(checkpoint, serve, name):
    """A process gets them encoded, which a thread of this one does not."""
    path, given = checkpoint(name), prompts_for(name)
    requests = [
        EngineRequest(str(i), ids, GREEDY, len(ids), encoder_inputs=prompt.encoder_inputs)
        for i, prompt in enumerate(prompts_of(loaded(path), given))
        if (ids := tuple(prompt.token_ids))
    ]
    async with serve(path) as engine:
        with ExitStack() as streams:
            opened = [streams.enter_context(engine.open(request)) for request in requests]
            updates = [await read(stream) for stream in opened]
    said = [tuple(u.token_id for u in each if u.token_id is not None) for each in updates]
    assert said == expected(path, given)


def test_default_encoder_budget_is_that_of_a_step(checkpoint):
    path = checkpoint("llava_clip")
    assert load(path, max_num_batched_tokens=100).core.facts.encoder_budget == 100
    facts = load(path, max_num_batched_tokens=8, max_num_seqs=8).core.facts
    assert facts.encoder_budget == TOKENS_PER_IMAGE


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_encode_blank_encodes_no_more_than_asked(checkpoint, name):
    encoder = load_model(checkpoint(name), EngineConfig(device="cpu"), lambda *_: None).encoder
    assert encoder is not None
    assert 50 < len(encoder.model.encode_blank(100)) <= 100


def test_default_encoder_cache_is_of_bytes_and_four_steps():
    images, config = GemmaImages(500, 256, (1, 3, 896, 896), 501, 502), EngineConfig()
    assert encoder_limits(config, images, "cpu", 2 * 2560).cache_tokens == 2**28 // (2 * 2560)
    assert encoder_limits(config, images, "cpu", 2**20).cache_tokens == 4 * 512
    on_gpu = partial(encoder_limits, config, images, "cuda", 2 * 2560)
    assert on_gpu(gpu_bytes=16 * 2**30).cache_tokens == 2**28 // (2 * 2560)
    assert on_gpu(gpu_bytes=80 * 2**30).cache_tokens == 80 * 2**30 // 64 // (2 * 2560)


@pytest.mark.parametrize("field", ["encoder_budget", "encoder_cache_tokens"])
def test_encoder_setting_below_one_image_is_refused(checkpoint, field):
    with pytest.raises(
        InvalidArgumentError, match=f"{field}: is 15; an image .* has up to 16 tokens"
    ):
        load(checkpoint("llava_clip"), **{field: 15})


def test_text_model_refuses_images_by_name(checkpoints, checkpoint):
    (prompt,) = prompts_of(loaded(checkpoint("llava_clip")), PROMPTS[:1])
    engine = load(checkpoints["llama"])
    assert engine.core.facts.encoder_budget == engine.core.facts.encoder_cache_tokens == 0
    with pytest.raises(FailedPreconditionError, match="'llama' takes no images: LlamaForCausalLM"):
        engine.generate([prompt], GREEDY)
    with pytest.raises(FailedPreconditionError, match="takes no images"):
        engine.prompt_with_images(IMAGE_TOKEN, [image(1)])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
def test_prompt_puts_transparent_image_on_white(checkpoint, mode):
    engine = loaded(checkpoint("llava_clip"))
    clear = image(1).convert("L").convert("RGBA")
    clear.putalpha(0)
    white = Image.new("RGB", clear.size, "white")
    shown = clear.quantize(8) if "P" in mode else clear
    shown = shown.convert(mode)
    given, expected = (
        engine.prompt_with_images(IMAGE_TOKEN, [each]).encoder_inputs for each in (shown, white)
    )
    assert given == expected


def test_images_that_do_not_fit_their_prompt_are_refused(checkpoint):
    engine = load(checkpoint("llava_clip"))
    (prompt,) = prompts_of(engine, PROMPTS[:1])
    (given,) = prompt.encoder_inputs
    pixels = given.tensors["pixel_values"]

    def refusal(**changes: Any) -> str:
        changed = MultimodalPrompt(prompt.token_ids, (replace(given, **changes),))
        with pytest.raises(InvalidArgumentError) as caught:
            engine.generate([changed], GREEDY)
        return str(caught.value)

    assert "is 15 tokens long; its image has 16" in refusal(length=15)
    assert f"expected the placeholder {PLACEHOLDER_ID}" in refusal(start=given.start + 1)
    assert "covers tokens [40, 56); the prompt has" in refusal(start=40)
    for tensors in ({}, {"pixels": pixels}, {"pixel_values": replace(pixels, dtype="int64")}):
        assert "tensors: are {" in refusal(tensors=tensors)
    short = {"pixel_values": replace(pixels, data=pixels.data[:-4])}
    assert "tensors['pixel_values']: has 6908 bytes; expected 6912" in refusal(tensors=short)
    assert_idle(engine)


def test_image_of_more_tiles_than_trained_is_refused(checkpoint):
    images = loaded(checkpoint("internvl")).core.facts.info.images
    assert isinstance(images, TiledImages)
    (tile,) = images.blank().values()

    def of(count: int) -> TensorData:
        return replace(tile, shape=(count, *tile.shape[1:]), data=tile.data * count)

    assert len(images.span({"pixel_values": of(13)})) == images.max_tokens == 52
    for count in (0, 14):
        with pytest.raises(InvalidArgumentError, match=f"have {count} tiles; expected 1 to 13"):
            images.span({"pixel_values": of(count)})


def test_pixtral_image_of_a_wrong_size_is_refused(checkpoint):
    images = loaded(checkpoint("mistral3")).core.facts.info.images
    assert isinstance(images, PixtralImages)
    assert len(images.span(_pixtral_tensors(48, 48))) == images.max_tokens == 20
    for height, width in ((48, 60), (0, 24), (24, 18)):
        with pytest.raises(InvalidArgumentError, match="pixels; expected multiples of 12 up to 48"):
            images.span(_pixtral_tensors(height, width))
    with pytest.raises(InvalidArgumentError, match="12x12 pixels, for one token; expected two"):
        images.span(_pixtral_tensors(12, 12))
    pixels, sizes = (_pixtral_tensors(*size) for size in ((24, 48), (48, 24)))
    with pytest.raises(InvalidArgumentError, match=r"is \(48, 24\); the image has 24x48 pixels"):
        images.span({**sizes, "pixel_values": pixels["pixel_values"]})
    with pytest.raises(InvalidArgumentError, match="tensors: are "):
        images.span({})


def _pixtral_tensors(height: int, width: int) -> dict[str, TensorData]:
    return {
        "pixel_values": TensorData("float32", (1, 3, height, width), bytes(12 * height * width)),
        "image_sizes": TensorData("int64", (1, 2), struct.pack("<2q", height, width)),
    }


@pytest.mark.parametrize("name", ["llava_pixtral", "mistral3"])
def test_image_has_one_hash_beside_a_larger_one(checkpoint, name):
    engine = load(checkpoint(name))
    small, large = image(1).resize((20, 14)), image(2)
    alone = engine.prompt_with_images(f"w1 {IMAGE_TOKEN}", [small])
    beside = engine.prompt_with_images(f"{IMAGE_TOKEN} {IMAGE_TOKEN}", [large, small])
    assert alone.encoder_inputs[0].content_hash == beside.encoder_inputs[1].content_hash


def test_pixtral_without_its_tokens_of_text_is_refused(checkpoint, tmp_path: Path):
    folder = _copy(checkpoint("mistral3"), tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"lacks \[IMG_BREAK\] and \[IMG_END\]"):
        load(str(folder))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_prefix_hit_that_ends_within_a_whole_image(checkpoint, kernels):
    """KV of an image's first tokens depends on its last ones, which the block's hash covers."""
    path = checkpoint("gemma3")
    engine = load(path, block_size=16, kernels=kernels)
    given: list[Given] = [
        (f"{words(9, 1)} {IMAGE_TOKEN} {words(1, seed)}", (image(1),)) for seed in range(8)
    ]
    prompts = prompts_of(engine, given)
    assert all(p.encoder_inputs[0].start == 10 for p in prompts)
    results = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [r.num_cached_tokens for r in results] == [0, *[16] * 7]
    assert tokens(results) == expected(path, given)


def test_whole_image_that_fits_no_step_is_refused(checkpoint):
    path = checkpoint("gemma3")
    for limits in (
        {"max_num_batched_tokens": GEMMA_TOKENS + 4, "max_num_seqs": 6},
        {"max_num_batched_tokens": GEMMA_TOKENS + 8, "max_num_seqs": 3, "max_drafts": 4},
        {"long_prefill_threshold": GEMMA_TOKENS - 1},
    ):
        engine = load(path, **limits)
        (prompt, text) = prompts_of(engine, [PROMPTS[0], PROMPTS[-1]])
        with pytest.raises(InvalidArgumentError, match=r"\[0\]: is 9 tokens .* has room for [78]:"):
            engine.generate([prompt], GREEDY)
        assert tokens(engine.generate([text], GREEDY)) == expected(path, PROMPTS[-1:])


def test_whole_image_without_text_after_it_is_refused(checkpoint):
    engine = load(checkpoint("gemma3"))
    (prompt,) = prompts_of(engine, PROMPTS[:1])
    (given,) = prompt.encoder_inputs
    ending = MultimodalPrompt(prompt.token_ids[: given.end], (given,))
    span = prompt.token_ids[given.start : given.end]
    doubled = MultimodalPrompt(
        (*prompt.token_ids[: given.end], *span, 1), (given, replace(given, start=given.end))
    )
    for each in (ending, doubled):
        with pytest.raises(InvalidArgumentError, match="is not followed by a token of text"):
            engine.generate([each], GREEDY)


def test_default_budget_beside_decodes_fits_a_whole_image():
    images = GemmaImages(500, 256, (1, 3, 896, 896), 501, 502)
    config = EngineConfig()
    assert tokens_with_decodes(config, None, "cpu") == 128
    assert tokens_with_decodes(config, images, "cpu") == 256 + 63
    assert encoder_limits(config, images, "cpu", 256).uncut_tokens == 256
    assert tokens_with_decodes(EngineConfig(max_num_seqs=400), images, "cpu") == 512
    assert encoder_limits(EngineConfig(max_num_seqs=600), images, "cpu", 256).uncut_tokens == 1
    limited = EngineConfig(max_num_tokens_with_decodes=128)
    assert tokens_with_decodes(limited, images, "cpu") == 128


def test_patches_that_do_not_fit_their_grid_are_refused(checkpoint):
    engine = load(checkpoint("qwen2_5_vl"))
    (prompt,) = prompts_of(engine, PROMPTS[:1])
    (given,) = prompt.encoder_inputs

    def refusal(name: str, **changes: Any) -> str:
        tensors = {**given.tensors, name: replace(given.tensors[name], **changes)}
        changed = MultimodalPrompt(prompt.token_ids, (replace(given, tensors=tensors),))
        with pytest.raises(InvalidArgumentError) as caught:
            engine.generate([changed], GREEDY)
        return str(caught.value)

    def grid(*sides: int) -> bytes:
        return b"".join(side.to_bytes(8, "little", signed=True) for side in sides)

    for sides in (2, 8, 10), (1, 8, 9), (1, -8, -10), (1, 0, 10):
        assert "expected 1 and multiples of 2" in refusal("image_grid_thw", data=grid(*sides))
    assert "has 80 patches; expected 64" in refusal("image_grid_thw", data=grid(1, 8, 8))
    assert "tensors: are {" in refusal("image_grid_thw", shape=(3,))
    assert "tensors: are {" in refusal("pixel_values", shape=(160, 48))
    assert "bytes; expected" in refusal("pixel_values", data=b"")
    assert_idle(engine)


def test_prompts_without_images_have_positions_as_they_are():
    images = PatchedImages(PLACEHOLDER_ID, 24, 96, 2)
    rope, indices, slots = RopePositions(4, images), np.arange(3), np.zeros(3, np.int64)
    ragged = RaggedBatch(np.array([0]), np.array([0]), np.array([3]), 0, [])
    assert rope.positions(ragged, slots, indices) is indices
    assert rope.offsets(slots) is None
    blank = EncoderInput(b"", 1, 2, images.blank())  # of 1 by 2 tokens
    rope.assign(0, (blank, replace(blank, start=4)))
    found = rope.positions(
        replace(ragged, num_queries=np.array([7])), np.zeros(7, int), np.arange(7)
    )
    assert found.tolist() == [
        [0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    rope.assign(0, ())
    assert rope.offsets(slots) is None


def test_text_with_too_few_image_tokens_is_refused(checkpoint):
    engine = load(checkpoint("llava_clip"))
    with pytest.raises(InvalidArgumentError, match="images: are 2; the text has 1 times '<image>'"):
        engine.prompt_with_images(f"w1 {IMAGE_TOKEN}", [image(1), image(2)])


def test_content_hash_covers_processor_names_and_tensors():
    given = TensorData("float32", (1, 2), bytes(8))
    found = {
        content_hash(processor, {name: tensor})
        for processor, name, tensor in [
            (b"a", "pixel_values", given),
            (b"b", "pixel_values", given),
            (b"a", "pixels", given),
            (b"a", "pixel_values", replace(given, dtype="int32")),
            (b"a", "pixel_values", replace(given, shape=(2, 1))),
            (b"a", "pixel_values", replace(given, data=bytes(7) + b"1")),
        ]
    }
    assert len(found) == 6
    assert {len(each) for each in found} == {16}


def test_unknown_vision_tower_is_refused(checkpoint, tmp_path: Path):
    config = _copy(checkpoint("llava_clip"), tmp_path) / "config.json"
    changed = config.read_text().replace('"clip_vision_model"', '"clip"')
    config.write_text(changed.replace('"CLIPVisionModel"', '""'))
    with pytest.raises(UnsupportedModelError, match="vision tower of this llava is clip; impl"):
        load(str(tmp_path))


def test_encoder_that_fails_for_its_own_images_is_refused(checkpoint, tmp_path: Path):
    config = _copy(checkpoint("gemma3"), tmp_path) / "config.json"
    changed = config.read_text().replace('"mm_tokens_per_image": 9', '"mm_tokens_per_image": 64')
    config.write_text(changed)
    with pytest.raises(UnsupportedModelError, match="encoder of Gemma3Model fails for an image as"):
        load(str(tmp_path))


def _copy(checkpoint: str, folder: Path) -> Path:
    for file in Path(checkpoint).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
