"""Work meter of the engine, against the work that was done."""

import pytest

from baton.engine.metering.work_meter import WorkDone
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, load
from tests.support.engine.prompts import random_prompt


def test_work_meter_counts_each_token_as_prefill_or_decode():
    engine = load(locate("tiny"), max_num_batched_tokens=48, max_num_seqs=8, prefix_caching=False)
    assert engine.core.reading().work_done == WorkDone()
    assert engine.core.facts.max_num_batched_tokens == 48
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.generate([random_prompt(100, seed=1)], params)
    done = engine.core.reading().work_done
    assert (done.num_prompt_tokens, done.num_decode_tokens, done.num_steps) == (100, 4, 7)
    assert done.num_prompt_pairs == 100 * 100 // 2
    engine.generate([random_prompt(30, seed=i) for i in range(3)], params)
    both = engine.core.reading().work_done
    assert both.num_prompt_tokens - done.num_prompt_tokens == 90
    assert both.num_decode_tokens - done.num_decode_tokens == 12
    assert both.seconds > done.seconds > 0
    assert_idle(engine)


@pytest.mark.parametrize(
    ("limits", "num_steps"), [({}, 3), ({"max_num_tokens_with_decodes": 8}, 4)]
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_generate_takes_the_largest_steps_unless_limited(limits, num_steps, ahead):
    """40 tokens of the long prompt are computed in the first step, beside the short one. A step
    that is planned before the short one ends knows that it does."""
    config = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "async_scheduling": ahead}
    engine = load(locate("tiny"), **config, **limits)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1)]
    engine.generate([random_prompt(8, seed=1), random_prompt(40 + 46 + 7, seed=2)], params)
    assert engine.core.reading().work_done.num_steps == num_steps
    assert_idle(engine)
