"""An fp8 (e4m3) KV cache: what it holds, what is generated over it, and what is refused."""

import math

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_scales import KvScales
from baton.engine.executor.models.loader import resolve_kv_dtype
from baton.engine.llm import LLM
from baton.engine.request import FinishReason
from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import BLOCK_SIZE
from tests.support.engine.engines import assert_idle, load, mostly_slow, tokens
from tests.support.engine.prompts import random_prompt
from tests.support.engine.quantisation import (
    NUM_TOKENS,
    NUMBERS,
    Scales,
    add_scales,
    check,
    decided,
    rounded,
)

FP8 = "fp8_e4m3"
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
FAMILIES = ["llama", "qwen3", "mistral_short", "gemma3", "gpt_oss", "deepseek_v3"]
NUM_LAYERS = 3
LENGTHS = (5, BLOCK_SIZE, BLOCK_SIZE + 1, 39, 64)


def some_scales(num_each: int) -> Scales:
    """From such that large numbers are clipped to such that small ones are subnormal."""
    generator = torch.Generator().manual_seed(num_each)
    return {
        (layer, kind): 0.004 * 1000 ** torch.rand(num_each, generator=generator)
        for layer in range(NUM_LAYERS)
        for kind in "kv"
    }


def bytes_of(path: str, **changes: object) -> list[int]:
    return [layout.block_bytes for layout in load(path, **changes).core.cache.layouts]


def test_fp8_store_rounds_to_nearest_and_never_to_nan():
    between = (NUMBERS[1:] + NUMBERS[:-1]) / 2  # as near to one as to the other
    x = torch.cat([NUMBERS, between, between * (1 + 1e-6), torch.tensor([449.0, 1e9, math.inf])])
    x = torch.cat([x, -x]).float()[:, None, None]
    for scale in (1.0, 0.25, 0.3):
        scales = KvScales(torch.full((1,), scale), torch.ones(1))
        key, value = scales.store(x * scale, x)
        assert key.dtype == value.dtype == torch.float8_e4m3fn
        assert torch.equal(value.float(), rounded(x))
        assert torch.equal(key.float(), rounded((x * scale) / scale))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_block_takes_half_the_bytes_of_bfloat16(checkpoints, family):
    path = checkpoints[family]
    small = bytes_of(path, kv_cache_dtype=FP8)
    assert small == bytes_of(path, kv_cache_dtype=FP8, dtype="bfloat16")
    assert [2 * size for size in small] == bytes_of(path, dtype="bfloat16")
    assert [4 * size for size in small] == bytes_of(path)


def test_fp8_cache_holds_more_tokens_in_equal_memory(checkpoints):
    given = {"num_blocks": None, "kv_cache_bytes": 2**22}
    plain, small = (load(checkpoints["llama"], kv_cache_dtype=k, **given) for k in ("auto", FP8))
    assert small.core.scheduler.stats().num_blocks // 4 == plain.core.scheduler.stats().num_blocks


@pytest.mark.parametrize("budget", mostly_slow([3, 17, 512], 17))
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llama", "gemma3", "deepseek_v3"))
def test_fp8_tokens_equal_attention_over_rounded_kv(checkpoints, family, budget):
    path = checkpoints[family]
    engine = load(
        path, kv_cache_dtype=FP8, max_num_batched_tokens=budget, max_num_seqs=min(budget, 8)
    )
    expected = decided(path, LENGTHS, NUM_TOKENS, {})
    check(engine, load(path), expected)
    again = engine.generate([*expected], GREEDY)
    assert tokens(again) == [e.token_ids for e in expected.values()]
    assert sum(r.num_cached_tokens for r in again) > 0
    assert_idle(engine)


@pytest.mark.parametrize(
    ("num_each", "name"),
    [
        (1, "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"),
        (1, "model.layers.{layer}.self_attn.attn.{kind}_scale"),
        (2, "model.layers.{layer}.self_attn.{kind}_scale"),
    ],
    ids=["of projections", "of attention", "of each head"],
)
@pytest.mark.parametrize("family", mostly_slow(["llama", "gemma3", "gpt_oss"], "llama"))
def test_fp8_scales_are_read_from_the_checkpoint(checkpoints, tmp_path, family, num_each, name):
    scales = some_scales(num_each)
    path = add_scales(checkpoints[family], tmp_path / "scaled", scales, name)
    engine = load(path, kv_cache_dtype=FP8, max_num_batched_tokens=17, max_num_seqs=4)
    check(
        engine,
        load(checkpoints[family], kv_cache_dtype=FP8),
        decided(path, LENGTHS, NUM_TOKENS, scales),
    )


def test_fp8_cache_serves_a_bfloat16_model(checkpoints):
    engine = load(checkpoints["llama"], kv_cache_dtype=FP8, dtype="bfloat16")
    prompts = [random_prompt(length) for length in (3, 20, 40)]
    results = engine.generate(prompts, GREEDY)
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}
    assert tokens(engine.generate(prompts, GREEDY)) == tokens(results)
    assert_idle(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_fp8_blocks_survive_swapping_and_recomputation(checkpoints, family, preemption):
    settings = {"kv_cache_dtype": FP8, "preemption": preemption, "max_num_seqs": 4}
    prompts = [random_prompt(30, seed) for seed in range(4)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    tight = load(checkpoints[family], **settings, num_blocks=8, swap_bytes=2**22)
    expected = load(checkpoints[family], **settings).generate(prompts, params)
    assert tokens(tight.generate(prompts, params)) == tokens(expected)
    assert tight.core.scheduler.stats().num_preemptions > 0
    assert (tight.core.scheduler.stats().num_swaps > 0) == (preemption == "swap")
    assert_idle(tight)


def test_fp8_forks_copy_the_last_block_of_their_prompt(checkpoints):
    engine = load(checkpoints["llama"], kv_cache_dtype=FP8)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, n=3)
    (forked,) = engine.generate([random_prompt(21)], params)
    (again,) = load(checkpoints["llama"], kv_cache_dtype=FP8, max_num_seqs=3).generate(
        [random_prompt(21)], params
    )
    assert len({c.token_ids for c in forked.completions}) == 3
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in forked.completions]
    assert_idle(engine)


def test_fp8_cache_has_its_own_prefix_namespace(checkpoints):
    plain, small = (
        load(checkpoints["llama"], kv_cache_dtype=k).core.facts.info for k in ("auto", FP8)
    )
    assert (plain.namespace.kv_dtype, small.namespace.kv_dtype) == ("float32", "float8_e4m3fn")
    assert plain.fingerprint == small.fingerprint, "the layout tells them apart"


def test_fp8_scales_are_part_of_the_fingerprint(checkpoints, tmp_path):
    name = "model.layers.{layer}.self_attn.{kind}_scale"
    plain = checkpoints["llama"]
    paths = [
        plain,
        *(
            add_scales(plain, tmp_path / str(i), {(1, "v"): torch.tensor(scale)}, name)
            for i, scale in enumerate((1.0, 0.5, 0.25))
        ),
    ]
    with_scales = [load(path, kv_cache_dtype=FP8).core.facts.info.fingerprint for path in paths]
    without = [load(path).core.facts.info.fingerprint for path in paths]
    assert len(set(with_scales)) == len(set(without)) == 4, "every byte of the files counts"
    assert with_scales[0] == without[0], "none are written, and all are 1"
    assert with_scales[2] != without[2]


def test_fp8_cache_is_rejected_on_a_gpu_without_fp8():
    with pytest.raises(InvalidArgumentError) as refusal:
        resolve_kv_dtype(FP8, torch.bfloat16, (8, 0))
    assert str(refusal.value) == (
        "kv_cache_dtype: is 'fp8_e4m3', which needs a GPU of compute capability 8.9 or newer; this "
        "one has 8.0: use --kv-cache-dtype auto there"
    )
    assert resolve_kv_dtype("auto", torch.bfloat16, (8, 0)) == torch.bfloat16
    for fits in ((8, 9), (9, 0), (12, 0), None):
        assert resolve_kv_dtype(FP8, torch.bfloat16, fits) == torch.float8_e4m3fn


def test_engine_config_rejects_an_unknown_kv_cache_dtype():
    with pytest.raises(
        InvalidArgumentError, match="kv_cache_dtype: is 'int8'; must be one of auto"
    ):
        EngineConfig(kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (torch.ones(3), "has 3 numbers; an fp8 KV cache takes one scale, or one for each of the"),
        (torch.tensor(0.0), "has to be above 0: use --kv-cache-dtype auto"),
        (torch.tensor(-1.0), "has to be above 0"),
        (torch.tensor(math.nan), "has to be above 0"),
        (torch.tensor(math.inf), "has to be above 0"),
    ],
)
def test_fp8_scales_that_are_invalid_are_rejected_by_name(checkpoints, tmp_path, scale, sentence):
    name = "model.layers.{layer}.self_attn.{kind}_scale"
    path = add_scales(checkpoints["llama"], tmp_path / "bad", {(2, "k"): scale}, name)
    with pytest.raises(UnsupportedModelError, match=sentence) as refusal:
        load(path, kv_cache_dtype=FP8)
    assert "model.layers.2.self_attn.k_scale" in str(refusal.value)
    assert isinstance(load(path), LLM), "which needs none"
