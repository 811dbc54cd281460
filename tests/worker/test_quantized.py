"""Quantized checkpoints, handed over and migrated: tokens equal to those of transformers."""

import asyncio

import pytest

from baton.sampling import SamplingParams
from tests.support.engine.engines import mostly_slow
from tests.support.engine.oracle import Oracle
from tests.support.engine.quantized.formats import Packed
from tests.support.waiting import until
from tests.support.worker.fleet import Request, fleet_of_workers
from tests.support.worker.reference import prompt_of

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("name", mostly_slow(["fp8 in blocks", "w4a16", "nf4"], "w4a16"))
async def test_quantized_model_answers_alike_when_migrated(packed: Packed, name: str) -> None:
    """Each prompt is computed by a prefill worker, and its answer by two decode workers."""
    path, numbers = packed.with_codes(name, "llama")
    prompts = [prompt_of(length) for length in (1, 30, 61)]
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
        said = [tuple(request.answer[0][0].token_ids) for request in requests]
        assert said == expected
        assert [request.num_migrations for request in requests] == [1] * len(prompts)
