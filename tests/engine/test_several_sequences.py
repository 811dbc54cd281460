"""Requests of several sequences: each says what it would say alone, however blocks are shared."""

from dataclasses import replace

import pytest

from baton.engine.config import EngineConfig
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, FinishReason
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import BLOCK_SIZE
from tests.support.engine.engines import (
    alone,
    answers,
    assert_idle,
    drain,
    load,
    mostly_slow,
    output_of,
    request,
)
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.grids import grid

RANDOM = SamplingParams(
    max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.5, top_p=0.95, seed=2**40 + 1
)
BEAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=3, beam_width=3)
LENGTHS = (1, 2, 3, 4, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 40, 3 * BLOCK_SIZE)
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 6}
SWAP = {"preemption": "swap", "swap_bytes": 2**20}
MODES = {"recompute": {"preemption": "recompute"}, "swap": SWAP}


@pytest.mark.parametrize("n", mostly_slow([2, 4, 16], 4))
@pytest.mark.parametrize(
    "family", mostly_slow(["llama", "gemma3", "mistral_short", "gpt2"], "llama", "gemma3")
)
def test_sequences_equal_requests_with_their_index(checkpoints, family, n):
    reference = load(checkpoints[family])
    engine = load(checkpoints[family], max_num_seqs=n, num_blocks=128)
    for length in LENGTHS if n < 16 else LENGTHS[::3]:
        prompt = random_prompt(length)
        engine.core.add(request("x", prompt, replace(RANDOM, n=n)))
        got = output_of(drain(engine)["x"])
        assert got == alone(reference, prompt, RANDOM, n), f"a prompt of {length} tokens"
        assert length < 4 or len(set(got.values())) > 1, "all sequences are the same"
    assert_idle(engine)


@grid(
    caching=[True, False],
    budget=mostly_slow([4, 7, 64], 7),
    policy=mostly_slow(POLICIES, "decode-first"),
)
def test_concurrent_forking_requests_equal_single_ones(checkpoints, caching, budget, policy):
    path = checkpoints["qwen3"]
    prompts = [random_prompt(length, seed=length) for length in (1, 16, 17, 33, 5)]
    counts = (4, 1, 3, 2, 4)
    reference = load(path)
    expected = [alone(reference, p, RANDOM, n) for p, n in zip(prompts, counts, strict=True)]
    engine = load(
        path, prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=4, policy=policy
    )
    for _ in range(2):
        said = [
            output_of(u) for u in answers(engine, prompts, [replace(RANDOM, n=n) for n in counts])
        ]
        assert said == expected
        assert_idle(engine)


@grid(num_blocks=mostly_slow([11, 13, 16, 20], 11, 16), mode=MODES, caching=[True, False])
def test_sequences_that_do_not_fit_together_finish(checkpoints, num_blocks, mode, caching):
    """No other request runs, so that its sequences can only make room for each other."""
    path, prompt = checkpoints["llama"], random_prompt(30)
    expected = alone(load(path), prompt, RANDOM, 6)
    engine = load(
        path, **{**TIGHT, **MODES[mode], "num_blocks": num_blocks}, prefix_caching=caching
    )
    engine.core.add(request("x", prompt, replace(RANDOM, n=6)))
    assert output_of(drain(engine)["x"]) == expected
    assert engine.core.scheduler.stats().num_preemptions > 0
    assert_idle(engine)


def test_sequence_indices_start_at_the_given_one(checkpoints):
    path, prompt = checkpoints["llama"], random_prompt(20)
    engine = load(path)
    whole = alone(engine, prompt, RANDOM, 5)
    engine.core.add(EngineRequest("x", prompt, replace(RANDOM, n=3), len(prompt), sequence_index=2))
    assert output_of(drain(engine)["x"]) == {i: whole[i] for i in (2, 3, 4)}


def test_sequences_share_the_blocks_of_their_prompt(checkpoints):
    engine = load(checkpoints["llama"])
    prompt = random_prompt(3 * BLOCK_SIZE + 5)
    engine.core.add(request("x", prompt, replace(RANDOM, n=4)))
    engine.core.step()
    engine.core.step()
    report = engine.core.scheduler.memory_report()
    # Three full blocks are held four times; the fourth is copied by all but the last to write.
    assert report.num_logical_blocks == 16
    assert report.num_physical_blocks == 3 + 4
    assert report.num_saved_blocks == 9
    assert report.num_physical_blocks == engine.core.scheduler.stats().num_held_blocks
    drain(engine)
    assert_idle(engine)


def test_sequences_end_independently_at_stop_tokens(checkpoints):
    path, prompt = checkpoints["llama"], random_prompt(20)
    free = alone(load(path), prompt, RANDOM, 4)
    stop = free[2][3]
    params = replace(RANDOM, n=4, stop_token_ids=(stop,))
    (result,) = load(path).generate([prompt], params)
    for index, completion in enumerate(result.completions):
        whole = free[index]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert completion.token_ids == whole[:end]
        reason = FinishReason.STOP_TOKEN if stop in whole else FinishReason.LENGTH
        assert completion.finish_reason is reason
    assert len(result.completions[2].token_ids) == 4


def test_best_of_returns_the_highest_mean_logprobs(checkpoints):
    engine = load(checkpoints["llama"], prefix_caching=False)
    stop = tuple(range(200, 260))
    for length in (1, 4, 17):
        prompt = random_prompt(length)
        params = replace(RANDOM, n=8, logprobs=True, stop_token_ids=stop)
        (every,) = engine.generate([prompt], params)
        means = [sum(p.logprob for p in c.logprobs) / len(c.logprobs) for c in every.completions]
        assert len({len(c.token_ids) for c in every.completions}) > 1, "all of one length"
        order = sorted(range(8), key=lambda i: -means[i])
        for n in (1, 3, 7):
            best = replace(params, n=n, best_of=8)
            (result,) = engine.generate([prompt], best)
            assert result.completions == tuple(every.completions[i] for i in order[:n])
            (unscored,) = engine.generate([prompt], replace(best, logprobs=False))
            assert [c.token_ids for c in unscored.completions] == [
                c.token_ids for c in result.completions
            ]
            assert all(c.logprobs == () for c in unscored.completions)
        # With as many returned as generated there is nothing to rank: they come by index.
        (result,) = engine.generate([prompt], replace(params, best_of=8))
        assert result.completions == every.completions


@pytest.mark.parametrize("params", [replace(RANDOM, n=4), BEAMS], ids=["samples", "beams"])
def test_abort_at_any_step_ends_all_sequences_of_a_request(checkpoints, params):
    engine = load(checkpoints["llama"], max_num_batched_tokens=16, max_num_seqs=4)
    for num_steps in range(14):
        engine.core.scheduler.flush_cache()
        engine.core.add(request("x", random_prompt(40), params))
        for _ in range(num_steps):
            engine.core.step()
        engine.core.scheduler.abort("x")
        engine.core.scheduler.check_integrity()
        assert drain(engine) == {}
        assert_idle(engine)


@pytest.mark.parametrize("mode", MODES)
def test_end_sequence_in_any_state_keeps_the_others(checkpoints, mode):
    """Two requests on a pool too small for both: at every step one sequence of the second ends."""
    prompts = [random_prompt(21, seed=i) for i in range(2)]
    reference = load(checkpoints["llama"])
    expected = [alone(reference, prompt, RANDOM, 3) for prompt in prompts]
    states: set[str] = set()
    engine = load(checkpoints["llama"], **TIGHT, **MODES[mode])
    for num_steps in range(2, 40, 2):
        engine.core.scheduler.flush_cache()
        for i, prompt in enumerate(prompts):
            engine.core.add(request(str(i), prompt, replace(RANDOM, n=3)))
        updates = [u for _ in range(num_steps) for u in engine.core.step().updates]
        index = num_steps // 2 % 3
        second = engine.core.scheduler.requests.get("1")
        has_begun = second is not None and not second.num_unforked
        here = [s for s in second.sequences if s.index == index] if has_begun else []
        states |= {s.status.name for s in here}
        engine.core.scheduler.end_sequence("1", index)
        engine.core.scheduler.end_sequence("1", index)
        engine.core.scheduler.check_integrity()
        later = drain(engine)
        for i in range(2):
            said = [u for u in updates if u.request_id == str(i)] + later.get(str(i), [])
            ends = [u for u in said if u.finish_reason is FinishReason.ABORTED]
            assert [(u.index, u.token_id) for u in ends] == [(index, None)] * (
                i == 1 and bool(here)
            )
            output = output_of(said)
            for j, whole in expected[i].items():
                is_cut = i == 1 and j == index and bool(here)
                assert output[j] == (whole[: len(output[j])] if is_cut else whole)
        assert_idle(engine)
    assert states == {"RUNNING", "SWAPPED" if mode == "swap" else "WAITING"}


def test_end_sequence_frees_its_own_blocks_at_once(checkpoints):
    engine = load(checkpoints["llama"])
    engine.core.add(request("x", random_prompt(40), replace(RANDOM, n=3)))
    for _ in range(6):
        engine.core.step()
    before = engine.core.scheduler.stats()
    engine.core.scheduler.end_sequence("x", 1)
    now = engine.core.scheduler.stats()
    assert (before.num_running, now.num_running) == (3, 2)
    assert now.num_held_blocks == before.num_held_blocks - 1, "the block it wrote to"


@pytest.mark.parametrize(
    "params",
    [
        replace(RANDOM, best_of=3),
        replace(BEAMS, n=2, beam_width=2),
    ],
    ids=["best of", "beams"],
)
def test_end_sequence_ignores_ranked_sequences(checkpoints, params):
    engine = load(checkpoints["llama"])
    engine.core.add(request("x", random_prompt(9), params))
    updates = []
    for _ in range(5):
        updates += engine.core.step().updates
        engine.core.scheduler.end_sequence("x", 0)
    updates += drain(engine)["x"]
    assert {u.finish_reason for u in updates} == {None, FinishReason.LENGTH}
    assert len(output_of(updates)) == params.num_sequences
    assert_idle(engine)


def test_slots_reserved_for_forks_are_not_taken(checkpoints):
    """A request of four that is still in its prompt, and others that would like the slots."""
    path = checkpoints["llama"]
    settings = EngineConfig(device="cpu", num_blocks=96, max_num_seqs=5, max_num_batched_tokens=5)
    engine = LLM.from_pretrained(path, settings)
    reference = load(path)
    long, short = random_prompt(60), random_prompt(4)
    engine.core.add(request("long", long, replace(RANDOM, n=4)))
    for i in range(6):
        engine.core.add(request(f"short {i}", short, RANDOM))
    updates = drain(engine)
    assert output_of(updates["long"]) == alone(reference, long, RANDOM, 4)
    for i in range(6):
        assert output_of(updates[f"short {i}"]) == alone(reference, short, RANDOM, 1)
    assert_idle(engine)
