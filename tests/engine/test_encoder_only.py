"""Engines with the encoder of a vision-language model alone: the outputs of a full engine, bit for
bit, without the language model in memory."""

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.client import EngineClient
from baton.engine.config import EngineConfig
from baton.engine.core.assembly import load as load_model
from baton.engine.facts import ModelInfo
from baton.engine.llm import LLM
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.models import locate
from baton.models.images.encoder_input import EncoderInput
from tests.support.engine.engines import load, mostly_slow
from tests.support.engine.images import (
    IMAGE_TOKEN,
    VISION_LANGUAGE,
    image,
    loaded,
    save_vision_language,
    words,
)
from tests.support.engine.streams import assert_empty, running

TEXT = f"w3 {IMAGE_TOKEN} {words(5, 1)} {IMAGE_TOKEN} {words(6, 2)}"
IMAGES = (image(1), image(2))
ONLY = EngineConfig(device="cpu", dtype="float32", encoder_only=True)
FAMILIES = ("llava_clip", "internvl", "mistral3", "gemma3", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def save(name: str) -> str:
        if name == "shapes":
            return str(locate(name))
        folder = tmp_path_factory.mktemp(name)
        save_vision_language(name, folder)
        return str(folder)

    return save


async def rows_of(engine: EngineClient, wanted: EncoderInput) -> torch.Tensor:
    """Returns the rows of an output, `[num_tokens, width]`."""
    async with engine.encoded("lease", EncodeJob(wanted)) as output:
        pool = engine.encoder_pool
        assert pool is not None
        blocks = pool.layers[0].keys[list(output.block_ids), 0]
        return blocks.flatten(0, 1)[: wanted.length].clone()


def agreed(info: ModelInfo) -> tuple[object, ...]:
    """Returns what two workers of one model have in common."""
    return info.fingerprint, info.namespace, info.vocab_size, info.max_model_len, info.images


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("name", mostly_slow(["shapes", *VISION_LANGUAGE], "shapes", *FAMILIES))
async def test_encoder_only_outputs_equal_full_engine_bitwise(saved, name, dtype):
    path = saved(name)
    full, only = load(path, dtype=dtype), load(path, dtype=dtype, encoder_only=True)
    assert agreed(only.core.facts.info) == agreed(full.core.facts.info)
    assert only.core.facts.layouts == full.core.facts.layouts
    assert only.core.facts.num_blocks == (1,) * len(full.core.facts.num_blocks)
    prompt = full.prompt_with_images(TEXT, IMAGES)
    images = full.core.facts.info.images
    assert images is not None
    kept = set(images.span(images.blank()))  # whose embeddings an encoder keeps
    assert all(kept.issuperset(images.span(i.tensors)) for i in prompt.encoder_inputs)
    async with running(full) as one, running(only) as other:
        for wanted in prompt.encoder_inputs:
            expected = await rows_of(one, wanted)
            assert expected.any()
            assert torch.equal(await rows_of(other, wanted), expected)
        assert other.reading.work_done.num_encoder_tokens == sum(
            i.length for i in prompt.encoder_inputs
        )
        await assert_empty(other)


def live_tensors() -> dict[int, torch.Tensor]:
    """All tensors of this process that have memory, by identity."""
    gc.collect()
    found = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    return {id(each): each for each in found if each.device.type != "meta"}


@pytest.mark.parametrize("name", FAMILIES)
def test_encoder_only_engine_holds_weights_of_encoder_alone(saved, name):
    whole, _ = loaded(saved(name))
    language = {*map(id, whole.get_decoder().parameters()), *map(id, whole.lm_head.parameters())}
    of_encoder = sum(p.nbytes for p in whole.parameters() if id(p) not in language)
    of_layer = sum(p.nbytes for p in whole.get_decoder().layers[0].parameters())
    before = live_tensors()
    model = load_model(saved(name), ONLY, lambda _phase, _fraction: None)
    new = [tensor for key, tensor in live_tensors().items() if key not in before]
    pools = [*model.cache.pools, model.cache.encoder_pool]
    in_pools = {pool.content.untyped_storage().data_ptr() for pool in pools if pool is not None}
    weights = [each for each in new if isinstance(each, torch.nn.Parameter)]
    others = {
        each.untyped_storage().data_ptr(): each.nbytes
        for each in new
        if not isinstance(each, torch.nn.Parameter)
    }
    assert sum(each.nbytes for each in weights) == of_encoder
    # Buffers, and rows of text within images.
    assert sum(size for at, size in others.items() if at not in in_pools) < of_layer


def test_encoder_only_engine_refuses_requests(saved):
    engine = LLM.from_pretrained(saved("llava_clip"), ONLY)
    with pytest.raises(FailedPreconditionError, match=r"the encoder of model .* alone"):
        engine.generate([[1, 2, 3]])
    engine.close()


def test_encoder_only_load_refuses_model_without_encoder():
    with pytest.raises(InvalidArgumentError, match="encoder_only: is set, and 'tiny' has no"):
        LLM.from_pretrained(locate("tiny"), ONLY)


def test_fingerprint_covers_weights_that_are_not_loaded(tmp_path: Path):
    save_vision_language("llava_clip", tmp_path)

    def fingerprint() -> bytes:
        return load_model(str(tmp_path), ONLY, lambda *_: None).info.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    (name,) = (n for n in weights if n.endswith("language_model.model.layers.2.mlp.up_proj.weight"))
    save_file({**weights, name: weights[name] + 1}, file, {"format": "pt"})
    assert fingerprint() != before
