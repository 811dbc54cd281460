"""Baton's greedy tokens are those of transformers, however the work is cut into steps."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from baton.cluster.prefix import PrefixNamespace
from baton.engine.executor.models.loader import bound_to
from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.errors import InvalidArgumentError, OverloadedError
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import BLOCK_SIZE, VOCAB_SIZE
from tests.support.engine.engines import (
    assert_idle,
    drain,
    load,
    mostly_slow,
    output_of,
    request,
    tokens,
)
from tests.support.engine.prompts import NUM_TOKENS, awkward_prompts, random_prompt, sharing_prompts
from tests.support.grids import grid

FUSED = [
    "llama", "llama_biased", "llama_yarn", "llama_llama3_rope", "qwen2", "qwen2_hybrid", "qwen3",
    "mistral_short", "mistral_long",
]  # fmt: skip
GENERIC = [
    "llama_gelu", "gpt2", "gpt2_scaled", "gemma2", "gemma3", "gpt_oss", "mixtral", "deepseek_v3",
    "cohere2", "gpt_neox", "gemma3n",
]  # fmt: skip
WINDOWED = ["mistral_short", "mistral_long"]
HYBRID = ["qwen2_hybrid", "gemma2", "gemma3", "gpt_oss", "cohere2", "gemma3n"]
FULL = [family for family in FUSED + GENERIC if family not in WINDOWED + HYBRID]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = SamplingParams(
    max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.5, top_p=0.9, top_k=50, seed=2**63 + 5
)


@pytest.mark.parametrize("family", mostly_slow(FUSED + GENERIC, "llama", "gemma3", "gpt_oss"))
def test_prefix_shared_within_a_step_gives_equal_tokens(checkpoints, oracle, family):
    """Six prompts in one step, of which one computes what all begin with."""
    path, prompts = checkpoints[family], [(*random_prompt(40), i) for i in range(6)]
    engine = load(path, max_num_batched_tokens=96, max_num_seqs=6, async_scheduling=True)
    expected = [oracle(path, p, NUM_TOKENS) for p in prompts]
    assert tokens(engine.generate(prompts, GREEDY)) == expected
    assert engine.core.scheduler.stats().num_hit_tokens == 5 * (40 // BLOCK_SIZE) * BLOCK_SIZE
    assert_idle(engine)


@pytest.mark.parametrize("budget", mostly_slow(range(1, 18), 1, 4, 5, 6, 11, 16))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_of_any_size_give_equal_tokens(checkpoints, oracle, family, budget):
    """Alone and behind decodes, so that chunks begin and end anywhere in a block."""
    path = checkpoints[family]
    engine = load(path, max_num_batched_tokens=budget, max_num_seqs=min(budget, 3), block_size=5)
    prompts = [random_prompt(length, seed=2) for length in (4, 31, 22, 16, 5)]
    expected = [oracle(path, p, NUM_TOKENS) for p in prompts]
    assert tokens(engine.generate(prompts[1:2], GREEDY)) == expected[1:2]
    assert tokens(engine.generate(prompts, GREEDY)) == expected
    assert_idle(engine)


ANY_SIZE = [*range(1, 34), 47, 63, 64, 65, 127, 128, 129, 255]


def cases_of_any_size() -> Iterator[Any]:
    """Each kind of attention meets chunks of each size, by families that take turns; all families
    do so nightly. Where chunks begin and end matters to blocks and windows, and to nothing else of
    a model."""
    for families in (FULL, WINDOWED, HYBRID):
        for turn, family in enumerate(families):
            for i, budget in enumerate(ANY_SIZE):
                is_its_turn = i % len(families) == turn
                later = pytest.mark.slow if is_its_turn else pytest.mark.nightly
                yield pytest.param(family, budget, marks=() if budget == 17 else later)


@pytest.mark.parametrize(("family", "budget"), [*cases_of_any_size()])
def test_chunks_of_any_size_give_equal_tokens_in_every_family(checkpoints, oracle, family, budget):
    path = checkpoints[family]
    engine = load(path, max_num_batched_tokens=budget, max_num_seqs=min(budget, 3))
    prompts = awkward_prompts()
    results = engine.generate(prompts, GREEDY)
    assert tokens(results) == [oracle(path, p, NUM_TOKENS) for p in prompts]
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}
    assert_idle(engine)


@pytest.mark.parametrize("budget", [3, 17, 512])
def test_tiny_model_equals_transformers(checkpoints, oracle, budget):
    path = checkpoints["tiny"]
    engine = load(path, max_num_batched_tokens=budget, max_num_seqs=min(budget, 8))
    texts = ["Once upon a time", "The little dog", "Hello", "One day, Tom and Lily went to the"]
    prompts = [tuple(engine.tokenizer.encode(text)) for text in texts]
    results = engine.generate(texts, SamplingParams(max_tokens=24))
    expected = [oracle(path, p, 24, ignore_eos=False) for p in prompts]
    assert tokens(results) == expected
    assert [r.text for r in results] == [
        engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected
    ]


@grid(
    family=["llama", "qwen2_hybrid", "mistral_short"],
    caching=[True, False],
    block_size=mostly_slow([1, 5, 16], 5),
)
def test_repeated_prompt_gives_equal_tokens_with_any_caching(
    checkpoints, oracle, family, caching, block_size
):
    path = checkpoints[family]
    engine = load(
        path, prefix_caching=caching, block_size=block_size, num_blocks=1600 // block_size
    )
    prompts = awkward_prompts()[:-1]
    expected = [oracle(path, p, NUM_TOKENS) for p in prompts]
    assert tokens(engine.generate(prompts, GREEDY)) == expected
    again = engine.generate(prompts, GREEDY)
    assert tokens(again) == expected
    # Of a prompt that is cached as a whole, one token is computed for its logits.
    cached = [min(len(p) // block_size * block_size, len(p) - 1) if caching else 0 for p in prompts]
    assert [r.num_cached_tokens for r in again] == cached
    assert_idle(engine)


@pytest.mark.parametrize("budget", [5, 33, 512])
@pytest.mark.parametrize("family", ["llama", "mistral_short"])
def test_prompts_that_share_a_prefix_equal_transformers(checkpoints, oracle, family, budget):
    path = checkpoints[family]
    engine = load(path, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = sharing_prompts()
    expected = [oracle(path, p, NUM_TOKENS) for p in prompts]
    results = engine.generate(prompts, GREEDY)
    assert tokens(results) == expected
    assert sum(r.num_cached_tokens for r in results) > 0
    assert tokens(engine.generate(prompts[::-1], GREEDY)) == expected[::-1]
    assert_idle(engine)


@pytest.mark.parametrize("num_cached_blocks", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral_short", "gpt2"])
def test_fully_cached_prompt_computes_one_token(checkpoints, oracle, family, num_cached_blocks):
    path, prompt = checkpoints[family], random_prompt(num_cached_blocks * BLOCK_SIZE)
    engine = load(path, async_scheduling=False)
    expected = oracle(path, prompt, NUM_TOKENS)
    for num_cached in (0, len(prompt) - 1, len(prompt) - 1):
        engine.core.add(request("x", prompt, GREEDY))
        first = engine.core.step()
        assert engine.core.scheduler.stats().num_step_tokens == len(prompt) - num_cached
        updates = [*first.updates, *drain(engine)["x"]]
        assert output_of(updates)[0] == expected
        assert {u.num_cached_tokens for u in updates} == {num_cached}
    # The copy that its last token went to is one more of the same content, and not found.
    assert engine.core.scheduler.stats().num_cached_blocks == sum(
        len(prompt + expected[:-1]) // BLOCK_SIZE for _ in engine.core.cache.pools
    )
    assert_idle(engine)


def test_fully_cached_prompt_hits_without_room_for_a_copy(checkpoints, oracle):
    """The pool is the prompt: its last block is computed again in its own place."""
    path, prompt = checkpoints["llama"], random_prompt(2 * BLOCK_SIZE)
    engine = load(path, num_blocks=2)
    params = SamplingParams(max_tokens=1)
    for num_cached in (0, BLOCK_SIZE, BLOCK_SIZE):
        (result,) = engine.generate([prompt], params)
        assert result.token_ids == oracle(path, prompt, 1)
        assert result.num_cached_tokens == num_cached
    assert_idle(engine)


def test_concurrent_copies_of_one_block_change_no_token(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(2 * BLOCK_SIZE)
    engine = load(path)
    engine.generate([prompt], GREEDY)
    many = [prompt] * 5
    results = engine.generate(many, [GREEDY] * 4 + [RANDOM])
    assert tokens(results)[:4] == [oracle(path, prompt, NUM_TOKENS)] * 4
    (alone,) = load(path).generate([prompt], RANDOM)
    assert results[4].token_ids == alone.token_ids
    assert [r.num_cached_tokens for r in results] == [len(prompt) - 1] * 5
    assert tokens(engine.generate([prompt], GREEDY)) == [oracle(path, prompt, NUM_TOKENS)]


def test_prompts_of_different_salts_share_nothing(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(3 * BLOCK_SIZE)
    engine = load(path)
    for salt, num_cached in ((b"", 0), (b"a", 0), (b"b", 0), (b"a", 47), (b"", 47)):
        engine.core.add(EngineRequest("x", prompt, GREEDY, len(prompt), salt=salt))
        updates = drain(engine)["x"]
        assert updates[0].num_cached_tokens == num_cached
        assert output_of(updates)[0] == oracle(path, prompt, NUM_TOKENS)


def test_flushed_cache_has_no_hits_and_reports_its_size(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(3 * BLOCK_SIZE)
    engine = load(path)
    for _ in range(2):
        (result,) = engine.generate([prompt], GREEDY)
        assert (result.token_ids, result.num_cached_tokens) == (oracle(path, prompt, NUM_TOKENS), 0)
        assert engine.core.scheduler.flush_cache() == 3
    assert engine.core.step().cache_events.cleared
    # Also while it is in use.
    engine.core.add(request("x", prompt, GREEDY))
    first = engine.core.step()
    engine.core.scheduler.flush_cache()
    updates = [*first.updates, *drain(engine)["x"]]
    assert output_of(updates)[0] == oracle(path, prompt, NUM_TOKENS)
    assert_idle(engine)


@pytest.mark.parametrize("max_num_seqs", [5, 24])
def test_concurrent_prompts_equal_prompts_run_alone(checkpoints, oracle, max_num_seqs):
    path = checkpoints["qwen3"]
    engine = load(path, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, num_blocks=300)
    prompts = [random_prompt(1 + 5 * i, seed=i) for i in range(24)]
    expected = [oracle(path, p, 1 + i) for i, p in enumerate(prompts)]
    params = [SamplingParams(max_tokens=1 + i) for i in range(24)]
    assert tokens(engine.generate(prompts, params)) == expected
    assert_idle(engine)


def test_decodes_of_very_unequal_lengths_equal_transformers(checkpoints, oracle):
    path = checkpoints["tiny"]
    engine = load(path, num_blocks=160, max_num_batched_tokens=512, max_num_seqs=8)
    prompts = [random_prompt(n, vocab_size=3000) for n in (1600, 3, 40, 5)]
    expected = [oracle(path, p, 6) for p in prompts]
    assert (
        tokens(engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))) == expected
    )


def test_generate_raises_overloaded_when_kept_blocks_fill_pool(checkpoints, oracle):
    """Blocks that are kept for a claimant are in its way, until they are released."""
    path, prompt = checkpoints["llama"], random_prompt(40)
    engine = load(path, num_blocks=4)
    engine.core.add(EngineRequest("kept", prompt, GREEDY, len(prompt), Purpose.PREFILL))
    drain(engine)
    others = [random_prompt(20, seed=i) for i in range(3)]
    for _ in range(2):
        with pytest.raises(OverloadedError, match="are kept by earlier requests"):
            engine.generate(others, GREEDY)
        assert (
            engine.core.scheduler.stats().num_waiting
            == engine.core.scheduler.stats().num_running
            == 0
        )
    engine.core.scheduler.release("kept")
    engine.core.scheduler.pause()
    with pytest.raises(OverloadedError, match="paused"):
        engine.generate(others, GREEDY)
    engine.core.scheduler.resume()
    assert tokens(engine.generate(others, GREEDY)) == [oracle(path, p, NUM_TOKENS) for p in others]
    assert_idle(engine)


def test_late_suspend_does_not_stop_the_next_request_of_that_id(checkpoints):
    engine, prompt = load(checkpoints["llama"]), random_prompt(9)
    engine.core.add(request("a", prompt, GREEDY))
    engine.core.scheduler.suspend("a")
    engine.core.scheduler.abort("a")
    engine.core.scheduler.suspend("a")
    engine.core.add(request("a", prompt, GREEDY))
    assert len(drain(engine)["a"]) == NUM_TOKENS
    assert_idle(engine)


def test_suspended_decode_has_one_last_update_with_its_blocks(checkpoints, oracle):
    engine, prompt = load(checkpoints["llama"]), random_prompt(9)
    engine.core.add(request("a", prompt, GREEDY))
    updates = [u for _ in range(3) for u in engine.core.step().updates]
    engine.core.scheduler.suspend("a")
    updates += drain(engine)["a"]
    *before, last = updates
    assert [u.finish_reason for u in before] == [None] * len(before)
    assert not any(u.block_ids for u in before)
    assert (last.finish_reason, last.position) == (FinishReason.SUSPENDED, before[-1].position)
    assert last.block_ids
    expected = oracle(checkpoints["llama"], prompt, NUM_TOKENS)
    assert tuple(u.token_id for u in before) == tuple(expected[: len(before)])
    engine.core.scheduler.release("a")
    assert_idle(engine)


@pytest.mark.timeout(30)
def test_generate_finishes_while_other_requests_lack_blocks(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(40)
    engine = load(path, num_blocks=6, policy="shortest-prefill")
    engine.core.add(EngineRequest("kept", prompt, GREEDY, len(prompt), Purpose.PREFILL))
    drain(engine)
    engine.core.add(request("long", random_prompt(75), GREEDY))
    short = random_prompt(20)
    assert tokens(engine.generate([short], GREEDY)) == [oracle(path, short, NUM_TOKENS)]
    engine.core.scheduler.release("kept")
    assert output_of(drain(engine)["long"])[0] == oracle(path, random_prompt(75), NUM_TOKENS)
    assert_idle(engine)


def test_generation_ends_at_the_model_end_token(checkpoints, oracle):
    path = checkpoints["llama_eos"]
    engine = load(path)
    prompts = [random_prompt(4, seed=i) for i in range(12)]
    free = [oracle(path, p, 40) for p in prompts]
    expected = [oracle(path, p, 40, ignore_eos=False) for p in prompts]
    assert any(len(e) < len(f) for e, f in zip(expected, free, strict=True)), "none ends early"
    results = engine.generate(prompts, SamplingParams(max_tokens=40))
    assert tokens(results) == expected
    for result in results:
        ended = result.token_ids[-1] in (384, 330)
        reason = FinishReason.END_OF_SEQUENCE if ended else FinishReason.LENGTH
        assert result.finish_reason is reason
    unstopped = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert tokens(unstopped) == free


def test_stop_token_ends_a_sequence_and_is_included(checkpoints, oracle):
    path = checkpoints["llama"]
    prompt = random_prompt(17)
    expected = oracle(path, prompt, NUM_TOKENS)
    stop = expected[4]
    end = expected.index(stop) + 1
    params = SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=(stop,))
    (result,) = load(path).generate([prompt], params)
    assert (result.token_ids, result.finish_reason) == (expected[:end], FinishReason.STOP_TOKEN)


def test_sequence_continues_from_any_of_its_tokens(checkpoints, oracle):
    path = checkpoints["qwen2"]
    engine = load(path)
    prompt = random_prompt(17)
    whole = oracle(path, prompt, NUM_TOKENS)
    (sampled,) = engine.generate([prompt], RANDOM)
    for expected, params in ((whole, GREEDY), (sampled.token_ids, RANDOM)):
        for given in range(NUM_TOKENS):
            ids = prompt + expected[:given]
            engine.core.add(EngineRequest(f"from {given}", ids, params, len(prompt)))
        continued: dict[str, list[int]] = {}
        positions: dict[str, list[int]] = {}
        while engine.core.has_work:
            for update in engine.core.step().updates:
                if update.token_id is not None:
                    continued.setdefault(update.request_id, []).append(update.token_id)
                    positions.setdefault(update.request_id, []).append(update.position)
        for given in range(NUM_TOKENS):
            assert tuple(continued[f"from {given}"]) == expected[given:]
            assert positions[f"from {given}"] == list(range(given, NUM_TOKENS))


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_caching": False},
        {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"block_size": 3, "num_blocks": 90, "max_num_seqs": 6, "max_num_batched_tokens": 31},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_seeded_sample_is_equal_alone_and_in_a_batch(checkpoints, family, changes):
    prompt = random_prompt(40)
    (alone,) = load(checkpoints[family]).generate([prompt], RANDOM)
    assert alone.token_ids != load(checkpoints[family]).generate([prompt], GREEDY)[0].token_ids
    engine = load(checkpoints[family], **changes)
    others = [random_prompt(n, seed=4) for n in (3, 17, 60, 33)]
    crowd = [*others[:2], prompt, *others[2:], prompt]
    params = [
        GREEDY,
        SamplingParams(max_tokens=20, temperature=3.0, seed=1),
        RANDOM,
        SamplingParams(max_tokens=9, temperature=0.5, top_k=3, seed=2),
        GREEDY,
        RANDOM,
    ]
    for _ in range(2):
        results = engine.generate(crowd, params)
        assert results[2].token_ids == results[5].token_ids == alone.token_ids


def test_random_numbers_count_from_the_start_of_the_output(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(40)
    (result,) = load(path).generate([prompt], RANDOM)
    with torch.inference_mode():
        ids = torch.tensor([prompt + result.token_ids[:-1]])
        logits = oracle.model(path)(ids).logits[0, len(prompt) - 1 :]
    sampler = Sampler(NUM_TOKENS, VOCAB_SIZE, logits.device, frozenset())
    batch_slots = np.arange(NUM_TOKENS)
    for batch_slot in range(NUM_TOKENS):
        sampler.assign(batch_slot, RANDOM, len(prompt))
    history = np.tile(np.array(prompt + result.token_ids, np.int32), (NUM_TOKENS, 1))
    sampled = sampler.choose(
        logits, batch_slots, np.zeros_like(batch_slots), len(prompt) + batch_slots, history
    ).fetch()
    assert tuple(sampled.token_ids.tolist()) == result.token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_reduced_precision_generates_to_the_end(checkpoints, family):
    engine = load(checkpoints[family], dtype="bfloat16", max_num_batched_tokens=64)
    prompts = awkward_prompts()
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
    for _ in range(2):
        results = engine.generate(prompts, params)
        assert all(len(r.token_ids) == NUM_TOKENS for r in results)
        assert all(-20 < logprob <= 0 for r in results for logprob in r.logprobs)
    assert_idle(engine)


def test_handoff_that_ends_with_its_first_token_reports_once(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(17)
    engine = load(path)
    params = SamplingParams(max_tokens=1)
    engine.core.add(EngineRequest("x", prompt, params, 17, kv_source=KvSource.EXTERNAL))
    assert [a.request_id for a in engine.core.step().external] == ["x"]
    engine.core.scheduler.commit_external("x", 9)
    assert engine.core.has_work
    (update,) = engine.core.step().updates
    assert (update.token_id, update.finish_reason) == (9, FinishReason.LENGTH)
    assert engine.core.step().updates == ()
    assert_idle(engine)


def test_yarn_extends_the_length_that_is_served(checkpoints, oracle):
    path, prompt = checkpoints["llama_extended"], random_prompt(100)
    engine = load(path, max_model_len=128)
    assert load(path).core.facts.info.max_model_len == 128
    assert tokens(engine.generate([prompt], GREEDY)) == [oracle(path, prompt, NUM_TOKENS)]
    with pytest.raises(InvalidArgumentError, match="made for 128 tokens"):
        load(path, max_model_len=129)


def test_end_of_the_tokenizer_ends_answers(checkpoints, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoints["tiny"], path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "<|pad|>"}))
    ends = load(checkpoints["tiny"]).core.facts.info.eos_token_ids
    pad = load(checkpoints["tiny"]).tokenizer.convert_tokens_to_ids("<|pad|>")
    assert load(str(path)).core.facts.info.eos_token_ids == ends | {pad}


def test_fingerprint_is_equal_for_loads_of_one_checkpoint(checkpoints):
    one, two = load(checkpoints["llama"]), load(checkpoints["llama"], num_blocks=3)
    assert one.core.facts.info == two.core.facts.info
    assert (
        one.core.facts.info.fingerprint
        != load(checkpoints["llama_yarn"]).core.facts.info.fingerprint
    )
    reduced = load(checkpoints["llama"], dtype="bfloat16")
    assert one.core.facts.info.fingerprint != reduced.core.facts.info.fingerprint


def test_fingerprint_and_prefix_namespace_depend_on_the_version():
    model, ways = (
        bytes(16),
        [("eager", "1.2"), ("eager", "1.3"), ("eager1", ".2"), ("eager1.2", "")],
    )
    prints = [bound_to(model, *way) for way in ways]
    assert prints[0] == bound_to(model, "eager", "1.2")
    roots = {PrefixNamespace(print_, b"", "float32", 16).root() for print_ in prints}
    assert len(set(prints)) == len(roots) == 4
