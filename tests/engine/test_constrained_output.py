"""Grammars through the engine: the most likely text that they allow, however steps are cut."""

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, FinishReason, KvSource
from baton.engine.scheduler.plan import NotAhead
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.engine.conftest import Checkpoints
from tests.support.engine.drafts import OracleDrafter
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
from tests.support.engine.kinds import KINDS, transcript
from tests.support.engine.oracle import Oracle
from tests.support.engine.streams import assert_empty, read, running
from tests.support.grids import nightly

PEOPLE = ("Tom", "Lily", "Timmy", "a little dog")
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"enum": list(PEOPLE)},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["who", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def regex(pattern: str, **changes: Any) -> SamplingParams:
    return replace(
        SamplingParams(max_tokens=24, grammar=Grammar(GrammarKind.REGEX, pattern)), **changes
    )


GRAMMARS = {
    "words": regex(r"(yes|no|maybe|once upon a time|nothing)"),
    "digits": regex(r"[0-9]{2,4}"),
    "sentence": regex(r"The (dog|cat|bird) (ran|sat|sang)( and (ran|sat|sang)){0,3}\."),
    "json": SamplingParams(
        max_tokens=60, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    ),
    "ebnf": SamplingParams(
        max_tokens=24,
        grammar=Grammar(GrammarKind.EBNF, 'root ::= "a" ("b" | "cd") ("b" | "cd")? "e"'),
    ),
    "biased": regex(r"[a-e]{4,9}", logit_bias=((68, 3.0), (70, 4.0), (71, -50.0))),
    "free": SamplingParams(max_tokens=24),
}
VERBS = ("ran", "sat", "sang")
FINITE: dict[str, Iterable[str]] = {
    "words": ("yes", "no", "maybe", "once upon a time", "nothing"),
    "digits": ["".join(d) for n in (2, 3, 4) for d in itertools.product("0123456789", repeat=n)],
    "sentence": [
        f"The {who} {first}{''.join(f' and {verb}' for verb in more)}."
        for who in ("dog", "cat", "bird")
        for first in VERBS
        for n in range(4)
        for more in itertools.product(VERBS, repeat=n)
    ],
}
TEXTS = ("Once upon a time, there was a little girl named", "Tom said", "How old is he? He is")
ROOM = {"num_blocks": 100, "max_num_seqs": 16, "max_num_batched_tokens": 64}
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 20}
WAYS: dict[str, dict[str, Any]] = {
    "at once": ROOM,
    "in chunks": {**ROOM, "max_num_batched_tokens": 3, "max_num_seqs": 3},
    "recomputed": {**TIGHT, "preemption": "recompute"},
    "swapped": {**TIGHT, "preemption": "swap", "swap_bytes": 2**22},
    "guessing": {**ROOM, "max_drafts": 4},
    "guessing amid preemption": {**TIGHT, "preemption": "recompute", "max_drafts": 4},
}


class BesideCore(EngineCore):
    """Computes each mask but a sequence's first beside the steps."""

    slow_mask_s = 0.0


def prompts_of(engine: LLM) -> dict[str, tuple[int, ...]]:
    return {
        f"{name} {i}": tuple(engine.tokenizer.encode(text))
        for name in GRAMMARS
        for i, text in enumerate(TEXTS)
    }


def params_of(key: str) -> SamplingParams:
    return GRAMMARS[key.rsplit(" ", 1)[0]]


def brute_force(
    oracle: Oracle, engine: LLM, path: str, prompt: tuple[int, ...], language: Iterable[str]
) -> tuple[int, ...]:
    """The most likely token of those with which some sentence of the language begins, again and
    again; an end only behind a sentence, and no more where nothing can follow."""
    sentences = {s.encode() for s in language}
    beginnings = {s[:n] for s in sentences for n in range(len(s) + 1)}
    ends = engine.core.facts.info.eos_token_ids
    pieces = {
        i: engine.tokenizer.decode([i]).encode()
        for i in range(engine.core.facts.info.vocab_size)
        if i not in engine.tokenizer.all_special_ids
    }
    said: list[int] = []
    text = b""
    while True:
        allowed = {i for i, piece in pieces.items() if piece and text + piece in beginnings}
        if text in sentences:
            if not allowed:
                return tuple(said)
            allowed |= ends
        with torch.inference_mode():
            logits = oracle.model(path)(torch.tensor([prompt + tuple(said)])).logits[0, -1]
        ranked = sorted(allowed, key=lambda i: -float(logits[i]))
        assert len(ranked) == 1 or float(logits[ranked[0]] - logits[ranked[1]]) > 1e-4, "a toss-up"
        said.append(ranked[0])
        if ranked[0] in ends:
            return tuple(said)
        text += pieces[ranked[0]]


def text_of(engine: LLM, token_ids: tuple[int, ...]) -> str:
    return str(engine.tokenizer.decode(token_ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> LLM:
    return load(checkpoints["tiny"], **ROOM)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[str, tuple[int, ...]]:
    """Returns what each prompt gets under each grammar by itself."""
    return {
        key: plain.generate([prompt], params_of(key))[0].token_ids
        for key, prompt in prompts_of(plain).items()
    }


@pytest.mark.parametrize("name", FINITE)
def test_greedy_output_is_the_most_likely_allowed_text(checkpoints, oracle, plain, name):
    path = checkpoints["tiny"]
    for text in TEXTS:
        prompt = tuple(plain.tokenizer.encode(text))
        (result,) = plain.generate([prompt], GRAMMARS[name])
        assert result.token_ids == brute_force(oracle, plain, path, prompt, FINITE[name])
        assert result.finish_reason is FinishReason.END_OF_SEQUENCE


def test_constrained_output_is_in_the_language(plain, expected):
    for key, said in expected.items():
        name, text = key.rsplit(" ", 1)[0], text_of(plain, said)
        if name == "json":
            found = json.loads(text)
            assert set(found) == {"who", "age"}
            assert found["who"] in PEOPLE
            assert isinstance(found["age"], int)
        elif name == "ebnf":
            assert re.fullmatch(r"a(b|cd){1,2}e", text)
        elif name != "free":
            assert re.fullmatch(GRAMMARS[name].grammar.text, text)
    assert len(set(expected.values())) > len(GRAMMARS), "all prompts say the same"


def all_at_once(engine: LLM, expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns what the prompts get that run together. An engine that takes drafts has those of the
    expected tokens."""
    prompts = prompts_of(engine)
    if engine.core.config.max_drafts:
        engine.core.drafter = OracleDrafter(expected, {k: len(p) for k, p in prompts.items()})
    for key, prompt in prompts.items():
        engine.core.add(request(key, prompt, params_of(key)))
    updates = drain(engine)
    return {key: output_of(updates[key])[0] for key in prompts}


@pytest.mark.parametrize("policy", mostly_slow(POLICIES, "decode-first"))
@pytest.mark.parametrize("way", WAYS)
def test_constrained_requests_equal_those_run_alone(checkpoints, expected, way, policy):
    engine = load(checkpoints["tiny"], **WAYS[way], policy=policy)
    assert all_at_once(engine, expected) == expected
    stats = engine.core.scheduler.stats()
    if "max_drafts" in WAYS[way]:
        assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0
    if "preemption" in WAYS[way]:
        assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (way == "swapped")
    assert_idle(engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("way", mostly_slow(WAYS, "guessing amid preemption"))
def test_masks_beside_the_steps_change_no_token(checkpoints, expected, way, ahead):
    engine = load(checkpoints["tiny"], BesideCore, **WAYS[way], async_scheduling=ahead)
    assert all_at_once(engine, expected) == expected
    assert engine.core.num_waits[NotAhead.GRAMMAR] > 0 or not ahead
    assert_idle(engine)


def test_constrained_requests_are_launched_ahead(checkpoints, expected):
    engine = load(checkpoints["tiny"], **ROOM, async_scheduling=True)
    assert all_at_once(engine, expected) == expected
    assert engine.core.num_waits.keys() <= {NotAhead.NOTHING}
    assert (
        engine.core.scheduler.stats().num_steps_ahead
        >= engine.core.reading().work_done.num_steps - 2
    )
    assert_idle(engine)


@pytest.mark.parametrize("turn", [*mostly_slow(range(4), 0, 1), *nightly(range(4, 20))])
def test_constrained_requests_equal_single_ones_in_random_pools(checkpoints, expected, turn, rng):
    """Requests come while others run; the pool has room for the largest and little more."""
    block_size = rng.choice([1, 2, 3, 4, 8])
    engine = load(
        checkpoints["tiny"],
        rng.choice([EngineCore, BesideCore]),
        block_size=block_size,
        num_blocks=-(-90 // block_size) + rng.choice([0, 1, 3, 10]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([8, 11, 20, 64]),
        preemption=rng.choice(["recompute", "swap", "auto"]),
        swap_bytes=rng.choice([0, 2**17, 2**22]),
        max_drafts=rng.choice([0, 2, 4]),
        policy=rng.choice(list(POLICIES)),
        prefix_caching=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.5,
    )
    prompts, updates = prompts_of(engine), {}
    to_come = sorted(prompts)
    rng.shuffle(to_come)
    while to_come or engine.core.has_work:
        while to_come and (not engine.core.has_work or rng.random() < 0.4):
            key = to_come.pop()
            engine.core.add(request(key, prompts[key], params_of(key)))
        for update in engine.core.step().updates:
            updates.setdefault(update.request_id, []).append(update)
        engine.core.scheduler.check_integrity()
    assert {key: output_of(updates[key])[0] for key in prompts} == expected
    assert_idle(engine)


# In others their steps are those of sequences of requests, which any two of way and policy test.
FORKED = ("guessing amid preemption", "in chunks", "swapped")


@pytest.mark.parametrize(
    "way", [*mostly_slow(FORKED, FORKED[0]), *nightly(way for way in WAYS if way not in FORKED)]
)
def test_forked_sequences_follow_the_grammar_independently(checkpoints, plain, way):
    engine = load(checkpoints["tiny"], **WAYS[way])
    n = min(4, engine.core.config.max_num_seqs)
    for name in GRAMMARS:
        params = replace(GRAMMARS[name], temperature=1.5, seed=5, n=n)
        prompts = [tuple(engine.tokenizer.encode(text)) for text in TEXTS[1:]]
        updates = answers(engine, prompts, params)
        for i, prompt in enumerate(prompts):
            said = output_of(updates[i])
            assert said == alone(plain, prompt, replace(params, n=1), n)
            assert name != "sentence" or len(set(said.values())) > 1, "all say the same"
    assert_idle(engine)


@pytest.mark.parametrize(
    "policy", ["decode-first", *nightly(each for each in POLICIES if each != "decode-first")]
)
def test_drafts_that_the_grammar_forbids_are_rejected(checkpoints, plain, expected, policy):
    """All drafts are what would be said without the grammar."""
    engine = load(checkpoints["tiny"], **ROOM, max_drafts=4, policy=policy)
    prompts = prompts_of(engine)
    free = {
        key: plain.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
        for key, prompt in prompts.items()
    }
    engine.core.drafter = OracleDrafter(free, {k: len(p) for k, p in prompts.items()}, 1000)
    for key, prompt in prompts.items():
        engine.core.add(request(key, prompt, params_of(key)))
    updates = drain(engine)
    assert {key: output_of(updates[key])[0] for key in prompts} == expected


def test_constrained_output_continues_from_any_of_its_tokens(checkpoints, expected):
    engine = load(checkpoints["tiny"], **ROOM)
    for key, prompt in prompts_of(engine).items():
        whole = expected[key]
        for given in range(1, len(whole)):
            engine.core.add(
                EngineRequest(f"{given}", prompt + whole[:given], params_of(key), len(prompt))
            )
        for given, updates in drain(engine).items():
            said = tuple(u.token_id for u in updates if u.token_id is not None)
            assert said == whole[int(given) :]


def test_engine_rejects_given_output_outside_the_language(checkpoints):
    engine = load(checkpoints["tiny"], **ROOM)
    prompt = tuple(engine.tokenizer.encode(TEXTS[0]))
    wrong = tuple(engine.tokenizer.encode("perhaps"))
    with pytest.raises(InvalidArgumentError, match="token 0 of the output"):
        engine.core.add(EngineRequest("x", prompt + wrong, GRAMMARS["words"], len(prompt)))
    assert not engine.core.has_work


@pytest.mark.parametrize("token_is_given", [True, False])
def test_constrained_output_continues_from_external_kv(checkpoints, expected, token_is_given):
    for key in ("words 0", "json 0", "sentence 1"):
        engine = load(checkpoints["tiny"], **ROOM, block_size=1)
        prompt = prompts_of(engine)[key]
        engine.generate([prompt], SamplingParams(max_tokens=1))
        engine.core.add(
            EngineRequest("x", prompt, params_of(key), len(prompt), kv_source=KvSource.EXTERNAL)
        )
        (allocation,) = engine.core.step().external
        assert allocation.num_hit_blocks == len(prompt)
        engine.core.scheduler.commit_external("x", expected[key][0] if token_is_given else None)
        updates = drain(engine).get("x", [])
        said = tuple(u.token_id for u in updates if u.token_id is not None)
        assert said == expected[key][token_is_given:]


def test_max_tokens_truncates_constrained_output(plain):
    (whole,) = plain.generate([TEXTS[0]], GRAMMARS["json"])
    for max_tokens in (1, 2, 5):
        (result,) = plain.generate([TEXTS[0]], replace(GRAMMARS["json"], max_tokens=max_tokens))
        assert result.token_ids == whole.token_ids[:max_tokens]
        assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": ((100, 100.0), (200, 50.0))},
        {"bad_token_ids": tuple((t,) for t in range(40, 290))},
        {"min_tokens": 20},
        {"temperature": 2.0, "top_p": 0.5, "seed": 3},
        {"temperature": 5.0, "min_p": 0.3, "top_k": 2},
    ],
)
def test_other_sampling_parameters_keep_output_in_the_language(plain, changes):
    for name in ("words", "digits", "sentence", "json"):
        params = replace(GRAMMARS[name], **changes)
        for result in plain.generate(TEXTS, params):
            text = text_of(plain, result.token_ids)
            assert result.finish_reason in (FinishReason.END_OF_SEQUENCE, FinishReason.LENGTH)
            if result.finish_reason is FinishReason.LENGTH:
                continue
            if name == "json":
                assert set(json.loads(text)) == {"who", "age"}
            else:
                assert re.fullmatch(GRAMMARS[name].grammar.text, text)


def test_logprobs_ignore_the_grammar(checkpoints, oracle, plain):
    params = replace(GRAMMARS["json"], logprobs=True, top_logprobs=2)
    (result,) = plain.generate([TEXTS[0]], params)
    ids = torch.tensor([result.prompt_token_ids + result.token_ids[:-1]])
    with torch.inference_mode():
        logits = oracle.model(checkpoints["tiny"])(ids).logits[0]
    rows = logits[len(result.prompt_token_ids) - 1 :].log_softmax(-1)
    wanted = [float(row[t]) for row, t in zip(rows, result.token_ids, strict=True)]
    assert list(result.logprobs) == pytest.approx(wanted, abs=2e-4)


def test_best_of_returns_texts_of_the_language(plain):
    params = replace(GRAMMARS["sentence"], temperature=1.5, seed=5, n=2, best_of=5, max_tokens=48)
    (result,) = plain.generate([TEXTS[0]], params)
    assert len(result.completions) == 2
    for completion in result.completions:
        assert re.fullmatch(params.grammar.text, text_of(plain, completion.token_ids))


def test_engine_rejects_a_grammar_that_does_not_compile(plain):
    for kind, text in (
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.EBNF, "root ::= nothing"),
    ):
        params = SamplingParams(grammar=Grammar(kind, text))
        with pytest.raises(InvalidArgumentError, match="grammar"):
            plain.generate([TEXTS[0]], params)
    assert_idle(plain)


def test_engine_rejects_grammars_without_a_tokenizer(checkpoints):
    engine = load(checkpoints["llama"])
    with pytest.raises(InvalidArgumentError, match="grammar"):
        engine.generate([(1, 2, 3)], GRAMMARS["words"])
    assert_idle(engine)


async def test_streams_follow_precompiled_grammars(checkpoints, expected):
    engine = load(checkpoints["tiny"], **ROOM)
    async with running(engine) as serving:
        for key, prompt in prompts_of(engine).items():
            params = params_of(key)
            wanted = request(key, prompt, params)
            grammar = await serving.compile_grammar(wanted)
            assert (grammar is None) == (params.grammar is None)
            with serving.open(wanted, grammar) as stream:
                assert output_of(await read(stream))[0] == expected[key]
        await assert_empty(serving)


async def test_client_rejects_a_bad_grammar_before_its_thread(checkpoints):
    """Neither when it was not compiled before its stream is opened."""
    bad = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(a"))
    async with running(load(checkpoints["tiny"], **ROOM)) as serving:
        with pytest.raises(InvalidArgumentError):
            await serving.compile_grammar(request("x", (5, 6, 7), bad))
        with pytest.raises(AssertionError, match="not compiled"):
            serving.open(request("x", (5, 6, 7), bad))
        with serving.open(request("y", (5, 6, 7), SamplingParams(max_tokens=3))) as stream:
            assert len(output_of(await read(stream))[0]) <= 3
        await assert_empty(serving)


@pytest.mark.parametrize("way", ["recomputed", "guessing amid preemption"])
def test_constrained_requests_run_among_all_other_kinds(checkpoints, plain, expected, way):
    others = {kind: KINDS[kind] for kind in ("sampled", "several", "beams", "scored", "penalised")}
    prompts = prompts_of(plain)
    alone_of = {}
    for kind, params in others.items():
        plain.core.add(request(kind, prompts["free 0"], params))
        alone_of[kind] = transcript(drain(plain)[kind])
    engine = load(checkpoints["tiny"], **{**WAYS[way], "num_blocks": 27})
    keys = ["words 0", *others, "json 1", "sentence 2", "free 1", "digits 0", "ebnf 1"]
    for key in keys:
        prompt = prompts["free 0"] if key in others else prompts[key]
        params = others[key] if key in others else params_of(key)
        engine.core.add(request(key, prompt, params))
    updates = drain(engine)
    for key in keys:
        if key in others:
            assert transcript(updates[key]) == alone_of[key]
        else:
            assert output_of(updates[key])[0] == expected[key]
    assert engine.core.scheduler.stats().num_preemptions > 0
    assert_idle(engine)


def test_request_fails_alone_beyond_its_grammar_budget(checkpoints, expected):
    engine = load(checkpoints["tiny"], **ROOM, max_grammar_s=1e-9)
    prompts = prompts_of(engine)
    free, bound = "free 0", next(key for key in prompts if params_of(key).grammar is not None)
    for key in (free, bound):
        engine.core.add(request(key, prompts[key], params_of(key)))
    updates = drain(engine)
    assert output_of(updates[free])[0] == expected[free]
    assert "--max-grammar-s" in updates[bound][-1].failure
    assert_idle(engine)
