"""Warm-up: after it, no load on the engine launches a kernel that Triton would have to compile."""

import random
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.sampling import SamplingParams
from baton_kernels.compilations import CompilationMeter
from tests.support.kernels.engine_families import VOCAB_SIZE
from tests.support.kernels.interpreter import IS_EMULATED, IS_INTERPRETED
from tests.support.kernels.specialisations import forget_compilations, recorded_keys
from tests.support.kernels.warm_engine import warm

NUM_REQUESTS, MAX_TOKENS = 2 if IS_INTERPRETED else 10, 5
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.8],
    "top_k": [0, 5],
    "repetition_penalty": [1.0, 1.3],
    "frequency_penalty": [0.0, 0.4],
    "logit_bias": [(), ((3, 1.0),), tuple((i, 0.5) for i in range(70))],
    "bad_token_ids": [(), ((5,),), ((1, 2, 3), (4,))],
    "min_tokens": [0, 2],
}

SIZES = {"max_num_batched_tokens": 40, "max_num_seqs": 6}


def serve_random_requests(engine: LLM, dice: random.Random, num_requests: int) -> None:
    """Prompts of any length, some of them alike, that arrive while others run."""
    shared = [dice.randrange(VOCAB_SIZE) for _ in range(40)]
    left = num_requests
    while left or engine.core.has_work:
        if left and dice.random() < 0.4:
            left -= 1
            rules = {name: dice.choice(values) for name, values in CHOICES.items()}
            params = SamplingParams(
                max_tokens=dice.randrange(2, MAX_TOKENS), stop_token_ids=(9,), **rules
            )
            length = dice.choice([1, 2, 3, 15, 16, 17, dice.randrange(4, 70)])
            prompt = (shared[: dice.randrange(40)] + dice.choices(range(VOCAB_SIZE), k=70))[:length]
            engine.core.add(EngineRequest(str(left), tuple(prompt), params, length))
        engine.core.step()


@pytest.mark.skipif(not IS_INTERPRETED, reason="keys are noted by the interpreter")
def test_warm_up_launches_all_that_serving_launches(folder: Any, load: Any, seed: int) -> None:
    engine: LLM = load(folder("llama"), **SIZES, deterministic=True, max_drafts=2)
    with recorded_keys() as warmed:
        warm(engine)
    assert warmed
    with recorded_keys() as serving:
        serve_random_requests(engine, random.Random(seed), NUM_REQUESTS)
    assert serving - warmed == set()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"deterministic": True, "max_drafts": 2}),
        ("llama", {"dtype": "bfloat16", "max_drafts": 3, "block_size": 64}),  # by TMA
        ("gemma2", {"dtype": "bfloat16"}),
        ("mixtral", {"dtype": "bfloat16"}),
        ("gpt_oss", {"dtype": "bfloat16"}),
    ],
)
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_engine_compiles_no_kernel_while_serving(
    folder: Any, load: Any, seed: int, family: str, changes: dict[str, Any]
) -> None:
    """By Triton's own keys, whatever this process has compiled before."""
    forget_compilations()
    engine: LLM = load(folder(family), **SIZES, cuda_graphs=not IS_EMULATED, **changes)
    late = CompilationMeter()
    if IS_EMULATED:
        warm(engine)
    late.start()
    serve_random_requests(engine, random.Random(seed), NUM_REQUESTS)
    assert late.num_late == 0
