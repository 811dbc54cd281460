"""Quantized checkpoints of every format, handed over and migrated: tokens and log-probabilities
equal to those of transformers."""

import asyncio

import pytest

from baton.sampling import SamplingParams
from tests.support.engine.oracle import Oracle
from tests.support.engine.quantized import fp4
from tests.support.engine.quantized.formats import Packed, by_lanes
from tests.support.engine.quantized.survey import SURVEYED
from tests.support.waiting import until
from tests.support.worker.fleet import Request, fleet_of_workers
from tests.support.worker.reference import prompt_of

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
QUICK, OFTEN = ("w4a16",), ("fp8 in blocks", "nf4")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("name", by_lanes(SURVEYED, QUICK, OFTEN))
async def test_quantized_model_answers_alike_when_migrated(packed: Packed, name: str) -> None:
    """Each prompt is computed by a prefill worker, and its answer by two decode workers."""
    path, numbers = packed.with_codes(name, "gpt_oss" if name in fp4.MXFP4 else "llama")
    prompts = [prompt_of(length) for length in (1, 29, 60)]
    oracle = Oracle()
    expected = [oracle(numbers, prompt, NUM_TOKENS) for prompt in prompts]
    async with fleet_of_workers(path, "prefill", "decode", "decode") as fleet:
        decode = fleet.member("decode-0")
        requests = [Request(fleet, prompt, GREEDY) for prompt in prompts]
        with decode.slowed():
            tasks = [asyncio.create_task(request.run()) for request in requests]
            await until(lambda: all(r.progress.num_received >= 5 for r in requests))
            await decode.drain()
            await asyncio.gather(*tasks)
        answers = [request.answer[0][0] for request in requests]
        assert [tuple(answer.token_ids) for answer in answers] == expected
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check_logprobs(numbers, prompt, answer.token_ids, answer.logprobs)
        assert [request.num_migrations for request in requests] == [1] * len(prompts)
