import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.rpc.params import params_of, params_to_message
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingDefaults, SamplingParams
from baton.v1 import sampling_pb2 as pb

ids = st.integers(0, 2**32 - 1)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
grammars = st.builds(Grammar, st.sampled_from(GrammarKind), texts)

anyone = {
    "max_tokens": st.integers(8, 2**32 - 1),
    "min_tokens": st.integers(0, 8),
    "seed": st.integers(0, 2**64 - 1),
    "length_penalty": st.floats(-10, 10),
    "early_stopping": st.sampled_from(EarlyStopping),
    "repetition_penalty": st.none() | st.floats(0, 10, exclude_min=True),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    "bad_words": st.lists(texts, max_size=3).map(tuple),
    "bad_token_ids": st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
    "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "prompt_logprobs": st.none() | st.integers(0, 20),
}
LEFT = [field.name for field in dataclasses.fields(SamplingDefaults)]

samples = st.builds(
    SamplingParams,
    **anyone,
    temperature=st.none() | st.floats(0, 100, exclude_min=True),
    top_k=st.none() | st.integers(0, 2**32 - 1),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    min_p=st.none() | st.floats(0, 1),
    n=st.integers(1, 4),
    best_of=st.none() | st.integers(4, 16),
    stop=st.lists(texts, max_size=4).map(tuple),
    logprobs=st.just(True),
    top_logprobs=st.integers(0, 20),
    grammar=st.none() | grammars,
    speculate=st.none() | st.booleans(),
)
beams = st.builds(
    SamplingParams,
    **anyone,
    n=st.integers(1, 2),
    beam_width=st.integers(2, 16),
    logprobs=st.booleans(),
    speculate=st.none() | st.just(False),
)


@given(samples | beams)
def test_params_round_trip_over_the_wire(params):
    over_the_wire = pb.SamplingParams.FromString(params_to_message(params).SerializeToString())
    assert params_of(over_the_wire, default_seed=9) == params


def test_params_and_message_have_the_same_fields():
    assert set(SamplingParams.__slots__) == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_to_proto_sets_every_field_but_those_left_to_others():
    message = params_to_message(SamplingParams())
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        stays_unset = ("best_of", "seed", "prompt_logprobs", "grammar", "speculate", *LEFT)
        if field.has_presence and field.name not in stays_unset:
            assert message.HasField(field.name), field.name
    assert params_of(message, default_seed=9) == SamplingParams(seed=9)


def test_from_proto_applies_defaults_and_seed_to_unset_fields():
    assert params_of(pb.SamplingParams(), default_seed=9) == SamplingParams(seed=9)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SamplingParams(max_tokens=0), "sampling.max_tokens"),
        (pb.SamplingParams(early_stopping=7), "sampling.early_stopping"),
        (pb.SamplingParams(grammar=pb.Grammar()), "sampling.grammar"),
        (pb.SamplingParams(grammar=pb.Grammar(regex="")), "sampling.grammar.regex"),
    ],
)
def test_from_proto_names_the_field_out_of_bounds(message, field):
    with pytest.raises(InvalidArgumentError) as caught:
        params_of(message, default_seed=0)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=2**32), "sampling.max_tokens"),
        (SamplingParams(stop_token_ids=(1, -1)), "sampling.stop_token_ids[1]"),
        (SamplingParams(logit_bias=((2**32, 1.0),)), "sampling.logit_bias[0]"),
        (SamplingParams(bad_token_ids=((1,), (1, 2**32))), "sampling.bad_token_ids[1][1]"),
    ],
)
def test_to_proto_names_the_field_that_the_message_cannot_hold(params, field):
    with pytest.raises(InvalidArgumentError) as caught:
        params_to_message(params)
    assert caught.value.field == field


def test_client_imports_nothing_heavy():
    heavy = "('torch', 'transformers', 'redis', 'baton.serving')"
    code = f"import sys, baton.client.client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
