"""Steps that are launched before the tokens of the step before them are known change nothing."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from baton.engine.core.engine_core import EngineCore, OnPlanned
from baton.engine.llm import LLM
from baton.engine.outputs import StepOutput
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.engine.scheduler.plan import NotAhead
from baton.engine.scheduler.scheduler import Scheduler
from baton.sampling import SamplingParams
from tests.support.daily_cases import daily_mark
from tests.support.engine.engines import (
    assert_idle,
    drain,
    load,
    mostly_slow,
    output_of,
    request,
    tokens,
)
from tests.support.engine.prompts import random_prompt
from tests.support.grids import nightly

KINDS = {
    "greedy": SamplingParams(max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=17, ignore_eos=True, temperature=1.2, top_p=0.9, seed=5),
    "logprobs": SamplingParams(max_tokens=9, ignore_eos=True, logprobs=True, top_logprobs=2),
    "ends early": SamplingParams(
        max_tokens=40, temperature=1.5, seed=1, stop_token_ids=(*range(40),)
    ),
    "short": SamplingParams(max_tokens=2, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=14, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5
    ),
}


class CountingCore(EngineCore):
    """Counts the steps after which another is under way already, and those of them that have
    prompts in them."""

    num_behind = 0
    num_with_prompts = 0

    def step(self, on_planned: OnPlanned = lambda: None) -> StepOutput:
        output = super().step(on_planned)
        if self._ahead is not None:
            self.num_behind += 1
            self.num_with_prompts += bool(self._ahead[0].chunks)
        return output


def counting(path: str, **settings: object) -> LLM:
    return load(path, CountingCore, **settings)


def crowd(engine: Any) -> dict[str, dict[int, tuple[int, ...]]]:
    """Requests of all kinds, three of each."""
    for name, params in KINDS.items():
        for i in range(3):
            prompt = random_prompt(5 + 9 * i, seed=i)
            engine.core.add(request(f"{name} {i}", prompt, params))
    return {name: output_of(updates) for name, updates in drain(engine).items()}


FAMILIES = ("llama", "gemma3", "mistral_short")
CHANGES: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 14}, {"max_cache_reads": 90})


@pytest.mark.parametrize(
    ("family", "changes"),
    [  # the others meet within three days
        pytest.param(family, changes, marks=() if family == "llama" else daily_mark(i + j, 3))
        for i, family in enumerate(FAMILIES)
        for j, changes in enumerate(CHANGES)
    ],
)
def test_async_scheduling_changes_no_token(checkpoints, family, changes):
    path, settings = checkpoints[family], {"max_num_seqs": 6, "block_size": 4, **changes}
    if "num_blocks" in settings:
        settings["num_blocks"] *= 2
    waiting, engine = (counting(path, async_scheduling=way, **settings) for way in (False, True))
    assert crowd(engine) == crowd(waiting)
    assert waiting.core.num_behind == 0
    assert engine.core.num_behind > 5
    assert_idle(engine)


def scheduled(engine: Any, seed: int) -> dict[str, dict[int, tuple[int, ...]]]:
    """Requests of all kinds that arrive at random, with prompts of any length; some are aborted."""
    dice, outputs = random.Random(seed), {}
    arrivals = sorted((dice.randrange(40), i) for i in range(32))
    leaving = {dice.randrange(32): dice.randrange(10) for _ in range(3)}
    updates: dict[str, list[Any]] = {}
    for step in range(1000):
        while arrivals and arrivals[0][0] <= step:
            _, i = arrivals.pop(0)
            kind = list(KINDS)[dice.randrange(len(KINDS))]
            prompt = random_prompt(dice.choice((1, 7, 30, 90)), seed=i)
            engine.core.add(request(f"{kind} {i}", prompt, KINDS[kind]))
        if not arrivals and not engine.core.has_work:
            break
        for update in engine.core.step().updates:
            updates.setdefault(update.request_id, []).append(update)
        engine.core.scheduler.check_integrity()
        for name, seen in updates.items():
            most = leaving.get(int(name.split()[-1]))
            if most is not None and len(seen) > most:
                engine.core.scheduler.abort(name)
    for name, seen in updates.items():
        if int(name.split()[-1]) not in leaving:
            outputs[name] = output_of([u for u in seen if u.token_id is not None])
    assert len(outputs) >= 29
    return outputs


@pytest.mark.parametrize("turn", [0, 1, *nightly(range(2, 6))])
@pytest.mark.parametrize("changes", mostly_slow([0, 1, 2], 0))
def test_async_scheduling_changes_no_token_in_random_schedules(checkpoints, turn, changes, seed):
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"num_blocks": 40, "max_num_seqs": 4},
        {"long_prefill_threshold": 5, "max_cache_reads": 300},
    )
    settings = {
        "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 16,
        **ways[changes],
    }  # fmt: skip
    path = checkpoints["llama"]
    waiting, engine = (counting(path, async_scheduling=way, **settings) for way in (False, True))
    assert scheduled(engine, seed) == scheduled(waiting, seed)
    assert engine.core.num_with_prompts > 5
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_abort_during_an_async_step_leaks_nothing(checkpoints, num_steps):
    """Its place may be taken before the step that still computes it is booked."""
    path, params = checkpoints["llama"], KINDS["greedy"]
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    expected = tokens(load(path).generate(prompts, params))
    engine = counting(path, async_scheduling=True, max_num_seqs=2)
    for i in range(2):
        engine.core.add(request(str(i), prompts[i], params))
    for _ in range(num_steps):
        engine.core.step()
    engine.core.scheduler.abort("0")
    engine.core.scheduler.check_integrity()
    engine.core.add(request("2", prompts[2], params))
    updates = drain(engine)
    assert output_of(updates["2"])[0] == expected[2]
    assert [u.token_id for u in updates["1"]] == list(expected[1][num_steps:])
    assert engine.core.num_behind > 0
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", range(4))
def test_suspend_of_a_waiting_request_keeps_steps_ahead(checkpoints, num_steps):
    path, params = checkpoints["llama"], KINDS["greedy"]
    prompts = [random_prompt(20, seed=i) for i in range(2)]
    expected = tokens(load(path).generate(prompts, params))
    engine = counting(path, async_scheduling=True, max_num_seqs=1)
    engine.core.add(request("runs", prompts[0], params))
    first = engine.core.step().updates
    engine.core.add(request("waits", prompts[1], params))
    engine.core.scheduler.suspend("waits")
    num_behind = engine.core.num_behind
    for _ in range(num_steps):
        first += engine.core.step().updates
    assert engine.core.num_behind == num_behind + num_steps
    engine.core.scheduler.suspend("runs")
    updates = drain(engine)
    updates["runs"] = [*first, *updates["runs"]]
    for name, whole in zip(("runs", "waits"), expected, strict=True):
        said = {u.position: u.token_id for u in updates[name] if u.token_id is not None}
        assert said == dict(enumerate(whole[: len(said)]))
        assert 1 <= len(said) <= num_steps + 3
        engine.core.scheduler.release(name)
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", range(5))
def test_suspend_before_last_token_spares_the_next_of_that_id(checkpoints, num_steps):
    path, params = checkpoints["llama"], KINDS["short"]
    engine = counting(path, async_scheduling=True)
    engine.core.add(request("other", random_prompt(20), KINDS["greedy"]))
    engine.core.add(request("a", random_prompt(9), params))
    for _ in range(num_steps):
        engine.core.step()
    engine.core.scheduler.suspend("a")
    for _ in range(4):
        engine.core.step()
    engine.core.scheduler.suspend("a")  # it has ended, by itself or suspended
    engine.core.scheduler.release("a")
    engine.core.add(request("a", random_prompt(9), params))
    assert len(drain(engine)["a"]) == 2
    assert_idle(engine)


def test_async_scheduling_waits_for_tokens_of_beams(checkpoints):
    engine = counting(checkpoints["llama"], async_scheduling=True)
    engine.core.add(request("a", random_prompt(9), SamplingParams(max_tokens=9, beam_width=2)))
    drain(engine)
    assert engine.core.num_behind == 0
    assert engine.core.num_waits.keys() - {NotAhead.NOTHING} == {NotAhead.BEAMS}
    assert engine.core.scheduler.stats().num_steps_ahead == 0


@pytest.mark.parametrize(
    "changes",
    [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"bad_token_ids": ((3, 4),)}],
)
def test_steps_ahead_choose_after_earlier_tokens_are_applied(checkpoints, changes):
    params = replace(KINDS["greedy"], **changes)
    waiting, engine = (
        counting(checkpoints["llama"], async_scheduling=way) for way in (False, True)
    )
    for each in (waiting, engine):
        each.core.add(request("a", random_prompt(9), params))
    assert output_of(drain(engine)["a"]) == output_of(drain(waiting)["a"])
    assert (
        engine.core.scheduler.stats().num_steps_ahead
        == engine.core.reading().work_done.num_steps - 1
    )


def test_steps_are_launched_ahead_amid_arrivals_and_endings(checkpoints):
    engine = counting(checkpoints["llama"], async_scheduling=True, max_num_seqs=8)
    for i in range(30):
        kind = ("greedy", "sampled", "ends early", "short", "logprobs")[i % 5]
        engine.core.add(request(f"{kind} {i}", random_prompt(1 + 5 * i, seed=i), KINDS[kind]))
        if i % 7 == 6:
            engine.core.scheduler.abort(f"{kind} {i}")
        engine.core.step()
    drain(engine)
    assert engine.core.num_waits.keys() <= {NotAhead.NOTHING}
    assert (
        engine.core.scheduler.stats().num_steps_ahead
        >= 0.95 * engine.core.reading().work_done.num_steps
    )
    assert_idle(engine)


@pytest.mark.parametrize(
    "leave", [None, Scheduler.abort, Scheduler.suspend, partial(Scheduler.end_sequence, index=0)]
)
def test_step_ahead_decodes_from_kv_committed_meanwhile(checkpoints, leave):
    """Also where another sequence leaves in the same gap, so that the count of decodes is equal."""
    path, params, prompt = checkpoints["llama"], KINDS["greedy"], random_prompt(30)
    alone = tokens(load(path).generate([prompt], params))[0]
    source = load(path)
    engine = counting(path, async_scheduling=True, prefix_caching=False)
    source.core.add(EngineRequest("p", prompt, params, len(prompt), Purpose.PREFILL))
    (sources,) = next(u.block_ids for u in reversed(drain(source)["p"]) if u.block_ids)
    engine.core.add(request("other", prompt[::-1], params))
    engine.core.step()
    engine.core.add(EngineRequest("d", prompt, params, len(prompt), kv_source=KvSource.EXTERNAL))
    external = [a for _ in range(3) for a in engine.core.step().external]
    assert engine.core.num_behind > 0
    (targets,) = external[0].block_ids
    for origin, target in zip(sources, targets, strict=False):
        content = source.core.cache.pools[0].read_block(origin)
        engine.core.cache.pools[0].write_block(target, content)
    engine.core.scheduler.commit_external("d", alone[0])
    if leave is not None:
        leave(engine.core.scheduler, "other")
    out = drain(engine)
    assert [u.token_id for u in out["d"]] == list(alone[1:])
    source.core.scheduler.release("p")
    engine.core.scheduler.release("other")
    assert_idle(engine)


def test_steps_are_launched_ahead_while_requests_wait_paused(checkpoints):
    engine = counting(checkpoints["llama"], async_scheduling=True)
    engine.core.add(request("runs", random_prompt(9), KINDS["greedy"]))
    engine.core.step()
    engine.core.scheduler.pause()
    engine.core.add(request("waits", random_prompt(9), KINDS["short"]))
    before = engine.core.num_behind
    for _ in range(5):
        engine.core.step()
    assert engine.core.num_behind == before + 5
    engine.core.scheduler.resume()
    assert len(drain(engine)["waits"]) == 2
