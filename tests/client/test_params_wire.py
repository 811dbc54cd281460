import subprocess
import sys

import pytest

from baton.errors import InvalidArgumentError
from baton.params_wire import from_proto, to_proto
from baton.sampling import SamplingParams
from baton.v1 import sampling_pb2 as pb


def test_parameters_come_back_as_they_left():
    params = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=2**64 - 1,
        stop_token_ids=(1, 2),
        stop=("a", "ö"),
        ignore_eos=True,
        logprobs=True,
    )
    assert from_proto(to_proto(params), default_seed=9) == params


def test_every_field_is_set_even_at_its_default():
    message = to_proto(SamplingParams())
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        assert message.HasField(name)
    assert from_proto(message, default_seed=9) == SamplingParams()


def test_unset_fields_take_the_documented_defaults_and_the_given_seed():
    assert from_proto(pb.SamplingParams(), default_seed=9) == SamplingParams(seed=9)


def test_a_seed_of_zero_is_a_seed():
    assert from_proto(pb.SamplingParams(seed=0), default_seed=9).seed == 0


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SamplingParams(max_tokens=0), "sampling.max_tokens"),
        (pb.SamplingParams(top_p=0.0), "sampling.top_p"),
        (pb.SamplingParams(temperature=float("nan")), "sampling.temperature"),
    ],
)
def test_a_value_out_of_bounds_names_its_field(message, field):
    with pytest.raises(InvalidArgumentError) as caught:
        from_proto(message, default_seed=0)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=2**32), "sampling.max_tokens"),
        (SamplingParams(stop_token_ids=(1, -1)), "sampling.stop_token_ids[1]"),
    ],
)
def test_a_number_the_message_cannot_hold_names_its_field(params, field):
    with pytest.raises(InvalidArgumentError) as caught:
        to_proto(params)
    assert caught.value.field == field


def test_a_passage_over_the_wire_twice_changes_nothing_more():
    once = from_proto(to_proto(SamplingParams(temperature=0.7, top_p=0.9)), default_seed=0)
    assert from_proto(to_proto(once), default_seed=0) == once


def test_the_client_imports_nothing_heavy():
    heavy = "('torch', 'transformers', 'redis', 'baton.serving')"
    code = f"import sys, baton.client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
