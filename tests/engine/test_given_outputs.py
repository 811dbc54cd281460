"""Samples that were begun elsewhere: each goes on behind what it has come to, as if it had been
here from the beginning, and nothing is computed but what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import baton.models
from baton.engine.llm import LLM
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.checkpoints import BLOCK_SIZE
from tests.support.engine.engines import assert_idle, drain, load, mostly_slow
from tests.support.engine.prompts import random_prompt
from tests.support.grids import grid

NUM_TOKENS = 14
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.5, seed=2**40 + 1)
PARAMS = {
    "seeded": SEEDED,
    "greedy": replace(SEEDED, top_k=1),
    "truncated": replace(SEEDED, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": replace(
        SEEDED, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5
    ),
    "bans": replace(
        SEEDED, bad_token_ids=(*((t,) for t in range(200)), (300, 301)), logit_bias=((400, 3.0),)
    ),
    "stopping late": replace(SEEDED, stop_token_ids=tuple(range(100, 160)), min_tokens=3),
    "scored": replace(SEEDED, logprobs=True, top_logprobs=3),
    "guessing": replace(SEEDED, top_k=1, repetition_penalty=0.6),
}
SMALL = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 8}
WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks": SMALL,
    "without a cache": {**SMALL, "prefix_caching": False},
    "ahead": {**SMALL, "async_scheduling": True},
    "guessing": {**SMALL, "max_drafts": 4},
    "recomputing": {**TIGHT, "preemption": "recompute"},
    "swapping": {**TIGHT, "preemption": "swap", "swap_bytes": 2**20},
    "blocks of one": {**TIGHT, "block_size": 1, "num_blocks": 128},
    "fitting prompts": {**TIGHT, "full_sequence_must_fit": True},
}
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 40)

Outputs = tuple[tuple[int, ...] | None, ...]
Whole = dict[int, list[SequenceUpdate]]


def of_each(updates: Sequence[SequenceUpdate]) -> Whole:
    """The updates with a token of each sequence."""
    found: Whole = {}
    for update in updates:
        if update.token_id is not None:
            found.setdefault(update.index, []).append(update)
    return found


def undisturbed(engine: LLM, prompt: tuple[int, ...], params: SamplingParams) -> Whole:
    engine.core.add(EngineRequest("whole", prompt, params, len(prompt)))
    return of_each(drain(engine, checked=False)["whole"])


def cut(whole: Whole, places: Sequence[int | None]) -> Outputs:
    """Returns the outputs of the sequences up to these places, as far as they are so long; None
    for those that had ended."""
    outputs: list[tuple[int, ...] | None] = []
    for index, place in enumerate(places):
        token_ids = tuple(u.token_id for u in whole[index] if u.token_id is not None)
        outputs.append(None if place is None else token_ids[: min(place, len(token_ids) - 1)])
    return tuple(outputs)


def resumed(prompt: tuple[int, ...], params: SamplingParams, outputs: Outputs) -> EngineRequest:
    return EngineRequest("rest", prompt, params, len(prompt), outputs=outputs)


def check_goes_on(updates: Sequence[SequenceUpdate], whole: Whole, outputs: Outputs) -> None:
    """They are the rest of the undisturbed ones: token for token, with their log-probabilities."""
    rest = of_each(updates)
    assert rest.keys() == {i for i, output in enumerate(outputs) if output is not None}
    for index, said in rest.items():
        expected = whole[index][len(outputs[index] or ()) :]
        for one, other in zip(said, expected, strict=True):
            assert (one.position, one.token_id) == (other.position, other.token_id)
            assert one.finish_reason is other.finish_reason
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            if one.logprobs is not None and other.logprobs is not None:
                assert one.logprobs.top_token_ids == other.logprobs.top_token_ids


@cache
def reference_of(path: str) -> LLM:
    return load(path)


@cache
def whole_of(path: str, length: int, name: str, n: int) -> Whole:
    params = replace(PARAMS[name], n=n)
    return undisturbed(reference_of(path), random_prompt(length), params)


PLACES: list[list[int | None]] = [[3, None, 0], [None, 13], [None, 0, 1, 2, 3, None, 11, 7]]


@grid(name=PARAMS, way=mostly_slow(WAYS, "in chunks"), places=PLACES)
def test_given_outputs_continue_as_if_never_interrupted(checkpoints, name, way, places):
    path = checkpoints["llama"]
    engine = load(path, **WAYS[way])
    for length in (1, BLOCK_SIZE, 40):
        whole = whole_of(path, length, name, len(places))
        params, outputs = replace(PARAMS[name], n=len(places)), cut(whole, places)
        engine.core.add(resumed(random_prompt(length), params, outputs))
        check_goes_on(drain(engine)["rest"], whole, outputs)
        assert_idle(engine)
    needs_room = len(places) == 8 and name != "stopping late"
    if way in ("recomputing", "swapping") and needs_room:
        assert engine.core.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("family", mostly_slow(["gemma3", "mistral_short", "gpt2"], "gemma3"))
@pytest.mark.parametrize("way", ["in chunks", "recomputing"])
def test_given_outputs_continue_in_other_model_families(checkpoints, family, way):
    path = checkpoints[family]
    engine = load(path, **WAYS[way])
    for length in (1, 16, 60):
        prompt, params = random_prompt(length), replace(SEEDED, n=3)
        whole = whole_of(path, length, "seeded", 3)
        outputs = cut(whole, [12, None, 4])
        engine.core.add(resumed(prompt, params, outputs))
        check_goes_on(drain(engine)["rest"], whole, outputs)
        assert_idle(engine)


@given(data=st.data())
@settings(max_examples=15)
def test_given_outputs_continue_from_random_positions(checkpoints, data):
    """Several such requests at once, beside one that begins."""
    path = checkpoints["llama"]
    way = data.draw(st.sampled_from(["guessing", "recomputing", "blocks of one"]))
    engine = load(path, **WAYS[way])
    expected: dict[str, tuple[Whole, Outputs]] = {}
    for number in range(data.draw(st.integers(1, 3))):
        length = data.draw(st.sampled_from(LENGTHS))
        name = data.draw(st.sampled_from(list(PARAMS)))
        n = data.draw(st.integers(2, 8))
        places = data.draw(st.tuples(*[st.none() | st.integers(0, NUM_TOKENS)] * n))
        if set(places) == {None}:
            places = (0,) * n
        whole = whole_of(path, length, name, n)
        outputs, params = cut(whole, places), replace(PARAMS[name], n=n)
        request = resumed(random_prompt(length), params, outputs)
        expected[str(number)] = whole, outputs
        engine.core.add(replace(request, request_id=str(number)))
    fresh = whole_of(path, 40, "seeded", 3)
    prompt = random_prompt(40)
    engine.core.add(EngineRequest("fresh", prompt, replace(SEEDED, n=3), len(prompt)))
    updates = drain(engine)
    for name, (whole, outputs) in expected.items():
        check_goes_on(updates[name], whole, outputs)
    check_goes_on(updates["fresh"], fresh, ((), (), ()))
    assert_idle(engine)


def test_given_outputs_continue_within_their_grammar():
    path = baton.models.locate("tiny")
    words = Grammar(GrammarKind.REGEX, "([a-z]{3,9} ){2,6}")
    params = replace(SEEDED, n=4, grammar=words, max_tokens=30, ignore_eos=False)
    prompt = (5, 6, 7)
    whole = undisturbed(load(path), prompt, params)
    assert len({len(of_one) for of_one in whole.values()}) > 1, "all of one length"
    for way in ("in chunks", "guessing"):
        engine = load(path, **WAYS[way])
        for places in ([0, 4, None, 8], [20, 20, 20, 20], [1, 2, 3, None]):
            outputs = cut(whole, places)
            engine.core.add(resumed(prompt, params, outputs))
            check_goes_on(drain(engine)["rest"], whole, outputs)


def begun_external(engine: LLM, request: EngineRequest) -> None:
    """The prompt's own blocks, computed here before, stand for those of another worker."""
    prompt = request.token_ids
    params = SamplingParams(max_tokens=1)
    engine.core.add(EngineRequest("warm", prompt, params, len(prompt)))
    drain(engine)
    engine.core.add(replace(request, kv_source=KvSource.EXTERNAL))
    assert [e.request_id for e in engine.core.step().external] == ["rest"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("come", ["arrives", "fails"])
def test_given_outputs_continue_over_external_prompt_kv(checkpoints, come, family):
    reference, engine = load(checkpoints[family]), load(checkpoints[family], **SMALL)
    for length in LENGTHS:
        prompt, params = random_prompt(length), replace(SEEDED, n=4)
        whole = undisturbed(reference, prompt, params)
        outputs = cut(whole, [7, None, 0, 12])
        begun_external(engine, resumed(prompt, params, outputs))
        before = engine.core.reading().work_done
        if come == "arrives":
            engine.core.scheduler.commit_external("rest", None)
        else:
            engine.core.scheduler.fail_external("rest")
        check_goes_on(drain(engine)["rest"], whole, outputs)
        assert_idle(engine)
        if come == "arrives":
            done = engine.core.reading().work_done
            num_computed = done.num_prompt_tokens - before.num_prompt_tokens
            # What each was given, once more from the last prompt token on.
            assert num_computed == (7 + 1) + 1 + (12 + 1)


def test_given_outputs_are_computed_as_prompts_in_few_steps(checkpoints):
    prompt, params = random_prompt(40), replace(SEEDED, n=4, max_tokens=60)
    engine = load(checkpoints["llama"])
    whole = undisturbed(load(checkpoints["llama"]), prompt, params)
    outputs = cut(whole, [50, None, 55, 52])
    engine.core.add(resumed(prompt, params, outputs))
    check_goes_on(drain(engine)["rest"], whole, outputs)
    done = engine.core.reading().work_done
    assert done.num_prompt_tokens == 39 + 51 + 56 + 53
    # One is chosen behind what was given; from then on each token takes a step.
    assert done.num_decode_tokens == (10 - 1) + (5 - 1) + (8 - 1)
    assert done.num_steps == 2 + 9


def test_given_outputs_share_the_blocks_of_their_prompt(checkpoints):
    engine = load(checkpoints["llama"], prefix_caching=False)
    prompt, params = random_prompt(3 * BLOCK_SIZE + 5), replace(SEEDED, n=4)
    whole = undisturbed(load(checkpoints["llama"]), prompt, params)
    engine.core.add(resumed(prompt, params, cut(whole, [3, 3, 3, 3])))
    engine.core.step()
    engine.core.step()
    report = engine.core.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (16, 3 + 4)
    drain(engine)
    assert_idle(engine)


@pytest.mark.parametrize("way", ["in chunks", "recomputing", "swapping"])
def test_given_outputs_aborted_at_any_step_leak_nothing(checkpoints, way):
    prompt, params = random_prompt(40), replace(SEEDED, n=4)
    engine = load(checkpoints["llama"], **WAYS[way])
    whole = undisturbed(load(checkpoints["llama"]), prompt, params)
    for num_steps in range(14):
        for name in ("rest", "other"):
            request = resumed(prompt, params, cut(whole, [6, 0, None, 11]))
            engine.core.add(replace(request, request_id=name))
        for _ in range(num_steps):
            engine.core.step()
            engine.core.scheduler.check_integrity()
        engine.core.scheduler.abort("rest")
        engine.core.scheduler.check_integrity()
        assert drain(engine).keys() <= {"other"}
        assert_idle(engine)


def test_given_outputs_continue_when_one_sequence_ends_early(checkpoints):
    prompt, params = random_prompt(40), replace(SEEDED, n=3)
    engine = load(checkpoints["llama"], **SMALL)
    whole = undisturbed(load(checkpoints["llama"]), prompt, params)
    num_cut = 0
    for num_steps in range(10):
        outputs = cut(whole, [6, None, 3])
        engine.core.add(resumed(prompt, params, outputs))
        updates = [u for _ in range(num_steps) for u in engine.core.step().updates]
        engine.core.scheduler.end_sequence("rest", 2)
        engine.core.scheduler.end_sequence("rest", 1)  # which was never here
        engine.core.scheduler.check_integrity()
        updates += drain(engine)["rest"]
        ended = [u.index for u in updates if u.finish_reason is FinishReason.ABORTED]
        num_cut += len(ended)
        rest = of_each(updates)
        for index in (0, 2):
            expected = [u.token_id for u in whole[index][len(outputs[index] or ()) :]]
            said = [u.token_id for u in rest.get(index, [])]
            assert said == (expected[: len(said)] if index in ended else expected)
        assert_idle(engine)
    assert num_cut > 3


TWO = replace(SEEDED, n=2)
Refused = Callable[[EngineRequest], EngineRequest]


@pytest.mark.parametrize(
    ("params", "outputs", "named"),
    [
        pytest.param(SEEDED, ((5,),), "outputs: is only", id="one sequence"),
        pytest.param(replace(TWO, best_of=3), ((5,), ()), "outputs: is only", id="the best"),
        pytest.param(
            SamplingParams(max_tokens=9, n=2, beam_width=2), ((5,), ()), "outputs: is only",
            id="beams",
        ),
        pytest.param(TWO, ((5,),), r"outputs: has 1 .* sampling\.n = 2", id="too few"),
        pytest.param(TWO, ((5,), (), ()), "outputs: has 3", id="too many"),
        pytest.param(TWO, (None, None), "outputs: are all complete", id="nothing left"),
        pytest.param(TWO, ((), (5, 512)), r"^outputs\[1\]\.token_ids\[1\]", id="no such token"),
        pytest.param(TWO, ((5,) * 14, ()), r"outputs\[0\]\.token_ids: has 14", id="too long"),
    ],
)  # fmt: skip
def test_given_outputs_that_are_invalid_are_rejected_by_name(checkpoints, params, outputs, named):
    engine = load(checkpoints["llama"])
    with pytest.raises(InvalidArgumentError, match=named):
        engine.core.add(resumed((5, 6, 7), params, outputs))
    assert_idle(engine)


def test_given_outputs_outside_the_grammar_are_rejected():
    engine = load(baton.models.locate("tiny"))
    params = replace(TWO, grammar=Grammar(GrammarKind.REGEX, "[a-z]+"))
    digit = tuple(engine.tokenizer.encode("7"))
    with pytest.raises(InvalidArgumentError, match=r"outputs\[1\]\.token_ids"):
        engine.core.add(resumed((5, 6, 7), params, ((), digit)))
    assert_idle(engine)


def test_given_outputs_are_not_allowed_in_a_prefill(checkpoints):
    engine = load(checkpoints["llama"])
    request = replace(resumed((5, 6), TWO, ((5,), ())), purpose=Purpose.PREFILL)
    with pytest.raises(AssertionError, match="given outputs in a prefill"):
        engine.core.add(request)
