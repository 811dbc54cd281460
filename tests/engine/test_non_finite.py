"""Requests whose logits are not finite: they fail, alone, and leave nothing behind."""

import logging
import random

import numpy as np
import pytest

from baton.engine.llm import LLM
from baton.errors import BatonError, NonFiniteError
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, load, mostly_slow, request, tokens
from tests.support.engine.kinds import GREEDY, KINDS
from tests.support.engine.overflow import OVERFLOWING, save_overflowing
from tests.support.engine.pooled import write_modules

FAMILIES = (
    *("llama", "mistral_short", "qwen3", "gemma2", "gpt_oss", "mixtral", "qwen3_moe"),
    *("gpt2", "gpt_neox", "deepseek_v3"),
)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class Overflowing:
    """Folders by family name, made when first asked for."""

    def __init__(self, root):
        self._root, self._made = root, {}

    def __getitem__(self, family: str) -> str:
        if family not in self._made:
            self._made[family] = save_overflowing(family, self._root / family)
        return self._made[family]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Overflowing:
    return Overflowing(tmp_path_factory.mktemp("overflowing"))


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(20, 512), k=count)


def broken(prompt: list[int], place: int) -> list[int]:
    return [*prompt[:place], OVERFLOWING, *prompt[place + 1 :]]


def run(engine: LLM, requests) -> tuple[dict[str, list[int]], dict[str, BatonError]]:
    """Returns the tokens of requests (id, prompt, parameters), and the errors of those that fail,
    by id."""
    for request_id, prompt, params in requests:
        engine.core.add(request(request_id, prompt, params))
    said, failed = {}, {}
    while engine.core.has_work:
        output = engine.core.step()
        failed |= output.failed
        for update in output.updates:
            assert update.request_id not in failed, "an update after the error"
            if update.token_id is not None:
                said.setdefault(update.request_id, []).append((update.index, update.token_id))
        engine.core.scheduler.check_integrity()
    return {i: of for i, of in said.items() if i not in failed}, dict(failed)


@pytest.mark.symptom(
    "sglang#38319, sglang#38355, Megatron-LM#6993",
    there="NaN in one request stays in the prefix cache: later prompts are garbage until a flush",
    here="Fails that request with `NonFiniteError`, and keeps nothing that it computed.",
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [256, 24])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llama", "mistral_short", "gpt_oss"))
def test_broken_request_leaves_shared_prefix_right(overflowing, oracle, family, chunk, kernels):
    path, prompt = overflowing[family], words(60, 1)
    engine = load(path, max_num_batched_tokens=chunk, max_num_seqs=8, kernels=kernels)
    alike = [*prompt[:48], *words(9, 2)]
    said, failed = run(engine, [("broken", broken(prompt, 50), SHORT), ("alike", alike, SHORT)])
    assert [*failed] == ["broken"]
    assert isinstance(failed["broken"], NonFiniteError)
    after = engine.generate([[*prompt[:48], *words(5, 3)], prompt], SHORT)
    assert tuple(t for _, t in said["alike"]) == oracle(path, alike, 4)
    assert tokens(after) == [oracle(path, r.prompt_token_ids, 4) for r in after]
    assert_idle(engine)


def test_broken_request_fails_over_an_fp8_cache(overflowing):
    """In which NaN stays NaN, while an infinite V is saturated."""
    engine = load(overflowing["gpt2"], kv_cache_dtype="fp8_e4m3")
    prompt = words(40, 7)
    (alone,) = load(overflowing["gpt2"], kv_cache_dtype="fp8_e4m3").generate([prompt], SHORT)
    requests = [("broken", broken(prompt, 35), SHORT), ("good", prompt, SHORT)]
    said, failed = run(engine, requests)
    assert [*failed] == ["broken"]
    assert tuple(t for _, t in said["good"]) == alone.completions[0].token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_broken_request_of_any_kind_fails(overflowing, kind):
    engine = load(overflowing["llama"], max_num_batched_tokens=40, max_num_seqs=16)
    prompt = words(50, 4)
    _, failed = run(engine, [("broken", broken(prompt, 44), KINDS[kind]), ("good", prompt, GREEDY)])
    assert {i: type(error) for i, error in failed.items()} == {"broken": NonFiniteError}
    assert engine.core.scheduler.stats().num_non_finite_requests == 1
    assert_idle(engine)


def test_broken_request_caches_only_what_it_found(overflowing):
    """In a batch that shares a prefix: the blocks before its own stay, and are announced alone."""
    engine = load(overflowing["llama"], max_num_batched_tokens=32, max_num_seqs=8)
    prompt = words(100, 5)
    engine.generate([prompt[:33]], SHORT)
    engine.core.scheduler.drain_events()
    with pytest.raises(NonFiniteError, match="request generate-0 has NaN or infinite logits at"):
        engine.generate([broken(prompt, 90)], SHORT)
    events = engine.core.scheduler.drain_events()
    assert not events.stored
    again = engine.generate([prompt], SHORT)
    assert again[0].num_cached_tokens == 32
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_pool_fails_when_its_output_is_not_finite(tmp_path, mode):
    path = save_overflowing("llama", tmp_path)
    write_modules(tmp_path, mode)
    engine = load(path, max_num_batched_tokens=32, max_num_seqs=8)
    prompt = words(60, 8)
    with pytest.raises(NonFiniteError):
        engine.pool([words(30, 9), broken(prompt, 40)])
    assert engine.core.scheduler.stats().is_idle
    (alone,), (beside, _) = load(path).pool([prompt]), engine.pool([prompt, words(9, 9)])
    assert np.abs(alone - beside).max() < 1e-5
    assert engine.core.scheduler.stats().num_non_finite_requests == 1


def test_broken_request_is_logged_once(overflowing, caplog):
    engine = load(overflowing["llama"])
    with caplog.at_level(logging.ERROR):
        run(engine, [("r1", broken(words(20, 6), 11), KINDS["several"])])
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "request r1 has NaN or infinite logits at position 19"
    ]
