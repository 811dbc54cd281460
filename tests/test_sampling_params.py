import dataclasses
import sys
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.engine.core.commands import Add
from baton.engine.core.process.command_codec import decode_command, encode_command
from baton.engine.request import EngineRequest
from baton.errors import InvalidArgumentError
from baton.rpc.params import params_of, params_to_message
from baton.sampling import (
    MAX_GRAMMAR_BYTES,
    EarlyStopping,
    Grammar,
    GrammarKind,
    SamplingParams,
    check_vocabulary,
)

NAN, INF = float("nan"), float("inf")
REGEX = Grammar(GrammarKind.REGEX, "a+")

# What else a value needs so that only its own bound is looked at.
COMPANY: dict[str, dict[str, Any]] = {
    "n": {"temperature": 1.0},
    "best_of": {"temperature": 1.0},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 100},
}

# Field -> (the ends of what is accepted, the nearest that is not). This is where each bound is
# tested; intake and the APIs test that they pass them on.
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_tokens": ([1, 10**6], [0, -1]),
    "min_tokens": ([0, 100], [-1, 101]),
    "temperature": ([0.0, 1e-300, 100.0], [-0.1, 100.1, NAN, INF, -INF]),
    "top_k": ([0, 1, 10**9], [-1]),
    "top_p": ([1e-9, 1.0], [0.0, 1.01, -0.5, NAN, INF]),
    "min_p": ([0.0, 1.0], [-0.01, 1.01, NAN, INF]),
    "seed": ([0, 2**64 - 1], [-1, 2**64]),
    "n": ([1, 16], [0, -1, 17]),
    "best_of": ([None, 1, 16], [0, -1, 17]),
    "beam_width": ([0, 2, 16], [1, -1, 17]),
    "length_penalty": ([-10.0, 10.0, 0.0], [-10.1, 10.1, NAN, INF, -INF]),
    "repetition_penalty": ([1e-6, 10.0], [0.0, -1.0, 10.1, NAN, INF]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN, INF]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN, -INF]),
    "top_logprobs": ([0, 20], [-1, 21]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21]),
    "stop": ([(), ("ö" * 128,), ("a",) * 64], [("",), ("ö" * 129,), ("a",) * 65, ("\ud800",)]),
    "bad_words": ([(), ("ö" * 128,), ("a",) * 64], [("",), ("a" * 257,), ("a",) * 65, ("\udfff",)]),
    "stop_token_ids": ([(), (1,) * 64], [(1,) * 65]),
    "logit_bias": (
        [(), ((0, -100.0), (1, 100.0)), tuple((i, 1.0) for i in range(300))],
        [
            ((-1, 1.0),),
            ((0, 100.1),),
            ((0, -100.1),),
            ((0, NAN),),
            ((0, INF),),
            ((0, 1.0), (1, 1.0), (0, 2.0)),
            tuple((i, 1.0) for i in range(301)),
        ],
    ),
    "bad_token_ids": (
        [(), ((0,),), (tuple(range(32)),), ((1,),) * 256],
        [((),), (tuple(range(33)),), ((1, -1),), ((1,),) * 257],
    ),
}

# What a refusal says that a value must be.
EXPECTED: dict[str, list[str]] = {
    "max_tokens": ["at least 1"],
    "min_tokens": ["at least 0", "in [0, max_tokens = 100]"],
    "temperature": ["in [0, 100]"],
    "top_k": ["0 (all) or more"],
    "top_p": ["in (0, 1]"],
    "min_p": ["in [0, 1]"],
    "seed": ["in [0, 2^64)"],
    "n": ["in [1, 16]"],
    "best_of": ["in [1, 16]"],
    "beam_width": ["0 (off) or in [2, 16]"],
    "length_penalty": ["in [-10, 10]"],
    "repetition_penalty": ["in (0, 10]"],
    "presence_penalty": ["in [-2, 2]"],
    "frequency_penalty": ["in [-2, 2]"],
    "top_logprobs": ["in [0, 20]"],
    "prompt_logprobs": ["in [0, 20]"],
    "stop": ["1 to 256 bytes", "at most 64", "text that UTF-8 can hold"],
    "bad_words": ["1 to 256 bytes", "at most 64", "text that UTF-8 can hold"],
    "stop_token_ids": ["at most 64"],
    "logit_bias": ["of a token id of at least 0", "in [-100, 100]", "given once", "at most 300"],
    "bad_token_ids": ["1 to 32 ids", "ids of at least 0", "at most 256"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, v) for field, (good, _) in BOUNDS.items() for v in good]
)
def test_sampling_params_accept_value_at_bound(field: str, value: object) -> None:
    params = SamplingParams(**COMPANY.get(field, {}), **{field: value})
    assert getattr(params, field) == value


@pytest.mark.parametrize(
    ("field", "value"), [(field, v) for field, (_, bad) in BOUNDS.items() for v in bad]
)
def test_sampling_params_refuse_value_past_bound_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**COMPANY.get(field, {}), **{field: value})
    assert caught.value.field.startswith(f"sampling.{field}")
    said, _, expected = caught.value.problem.partition("; must be ")
    assert said.startswith("is ")
    assert expected in EXPECTED[field]


@pytest.mark.parametrize("text", ["", "a" * (MAX_GRAMMAR_BYTES + 1), "ö" * 32_769, "\ud800"])
@pytest.mark.parametrize("kind", GrammarKind)
def test_grammar_refuses_empty_or_too_long_text(kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Grammar(kind, text)
    assert caught.value.field == f"sampling.grammar.{kind.value}"
    assert len(caught.value.problem) < 100


def test_grammar_accepts_text_of_maximum_length() -> None:
    assert Grammar(GrammarKind.EBNF, "a" * MAX_GRAMMAR_BYTES)


ALIKE = "must be 1 where sampling.temperature is 0: the sequences would be the same"
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "more returned than generated": (
        {"n": 3, "best_of": 2, "temperature": 1.0},
        "best_of: is 2; must be at least sampling.n = 3",
    ),
    "several equal ones": ({"n": 2, "temperature": 0.0}, f"n: is 2; {ALIKE}"),
    "several equal ones, one returned": (
        {"best_of": 2, "temperature": 0.0},
        f"best_of: is 2; {ALIKE}",
    ),
    "several equal ones of more": ({"n": 2, "best_of": 3, "temperature": 0.0}, f"n: is 2; {ALIKE}"),
    "a minimum above the maximum": (
        {"min_tokens": 5, "max_tokens": 4},
        "min_tokens: is 5; must be in [0, max_tokens = 4]",
    ),
    "a default maximum": (
        {"min_tokens": 17},
        "min_tokens: is 17; must be in [0, max_tokens = 16]",
    ),
    "top without logprobs": (
        {"top_logprobs": 1},
        "top_logprobs: is 1; must be 0 where sampling.logprobs is false",
    ),
    "a number of logprobs, as of vLLM": (
        {"logprobs": 2},
        "logprobs: is 2; must be true or false. The most likely tokens are logprobs=True, "
        "top_logprobs=2",
    ),
    "a text in place of texts": (
        {"stop": "END"},
        "stop: is the text 'END'; must be a tuple of texts",
    ),
    "more than the beams": (
        {"beam_width": 2, "n": 3},
        "n: is 3; must be at most sampling.beam_width = 2",
    ),
    "a token biased twice": (
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        "logit_bias: is given 2 times for token 5; must be given once",
    ),
    **{
        f"beams, {field}": (
            {"beam_width": 2, "logprobs": True, field: value},
            f"beam_width: is 2; must be 0 (off) where sampling.{field} is set",
        )
        for field, value in {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.1,
            "best_of": 2,
            "stop": ("x",),
            "top_logprobs": 1,
            "grammar": REGEX,
            "speculate": True,
        }.items()
    },
}


@pytest.mark.parametrize(("fields", "refusal"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_sampling_params_name_both_sides_of_contradiction(
    fields: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == f"sampling.{refusal}"


COMPATIBLE: dict[str, dict[str, Any]] = {
    "beams": {
        "beam_width": 4, "n": 4, "length_penalty": -1.0, "early_stopping": EarlyStopping.NEVER,
        "repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "min_tokens": 3, "logit_bias": ((1, 2.0),), "bad_words": ("x",), "bad_token_ids": ((1,),),
        "logprobs": True, "prompt_logprobs": 20, "speculate": False, "stop_token_ids": (5,),
        "ignore_eos": True,
    },
    "samples": {
        "temperature": 1.0, "n": 2, "best_of": 5, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
        "grammar": REGEX, "speculate": True, "logprobs": True, "top_logprobs": 20,
        "prompt_logprobs": 0, "stop": ("x",), "min_tokens": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", COMPATIBLE.values(), ids=COMPATIBLE)
def test_sampling_params_keep_compatible_fields(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 1),
        ({"n": 3, "temperature": 1.0}, 3),
        ({"n": 3, "best_of": 5, "temperature": 1.0}, 5),
        ({"beam_width": 4, "n": 2}, 4),
    ],
)
def test_sampling_params_count_sequences_by_candidates(fields: dict[str, Any], number: int) -> None:
    assert SamplingParams(**fields).num_sequences == number


def test_check_vocabulary_names_place_of_unknown_token() -> None:
    params = SamplingParams(
        logit_bias=((1, 1.0), (9, 1.0), (8, 1.0)), bad_token_ids=((9,), (3, 8, 9))
    )
    check_vocabulary(params, 10)
    with pytest.raises(
        InvalidArgumentError, match=r"sampling\.logit_bias: has .* 9, 8; must be in"
    ):
        check_vocabulary(params, 8)
    with pytest.raises(InvalidArgumentError, match=r"sampling\.bad_token_ids\[1\]\[1\]: is 8"):
        check_vocabulary(SamplingParams(bad_token_ids=((3,), (3, 8))), 8)


@given(st.integers(-3, 20), st.none() | st.integers(-3, 20), st.integers(-3, 20), st.booleans())
def test_sampling_params_are_consistent_when_accepted(
    n: int, best_of: int | None, beam_width: int, is_random: bool
) -> None:
    try:
        params = SamplingParams(
            n=n, best_of=best_of, beam_width=beam_width, temperature=float(is_random)
        )
    except InvalidArgumentError:
        return
    assert 1 <= params.n <= params.num_sequences <= 16
    assert params.num_sequences == 1 or params.beam_width or not params.is_greedy
    assert dataclasses.replace(params) == params


def test_sampling_params_are_checked_at_each_edge_alone() -> None:
    codes = {kind.check.__code__: kind for kind in (SamplingParams, Grammar)}
    checked: list[type] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            checked.append(codes[frame.f_code])

    sys.setprofile(note)
    try:
        params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+"))  # by the client
        for _ in ("router", "worker"):
            params = params_of(params_to_message(params), default_seed=0)
        add = Add(0, EngineRequest("a", (5,), params, 1))
        decoded = decode_command(encode_command(add))  # by the engine's process
    finally:
        sys.setprofile(None)

    assert checked == [Grammar, SamplingParams] * 3
    assert isinstance(decoded, Add)
    assert decoded.request.params == params
