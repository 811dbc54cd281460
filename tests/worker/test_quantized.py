"""Quantized checkpoints of every format, handed over and migrated: tokens and log-probabilities
equal to those of transformers."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from baton.sampling import SamplingParams
from tests.support.engine.oracle import Oracle
from tests.support.engine.quantized import fp4
from tests.support.engine.quantized.formats import Packed
from tests.support.engine.quantized.survey import SURVEYED
from tests.support.waiting import until
from tests.support.worker.fleet import Request, fleet_of_workers
from tests.support.worker.reference import prompt_of

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
# The most that log-probabilities may differ, relative to the spread of the logits.
BOUND = 1e-4
AT_ONCE, OFTEN = ("w4a16",), ("fp8 in blocks", "nf4")


def by_lanes(names: Sequence[str]) -> list[object]:
    """Formats as parameters; most are of `make nightly`."""
    marks = {**dict.fromkeys(AT_ONCE, ()), **dict.fromkeys(OFTEN, pytest.mark.slow)}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.nightly)) for name in names]


def logprobs_of(
    oracle: Oracle, path: str, prompt: Sequence[int], token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of transformers, of tokens that follow a prompt, and the spread of the logits that each
    is of."""
    ids = torch.tensor([[*prompt, *token_ids]])
    with torch.inference_mode():
        logits = oracle.model(path)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return chosen, logits.std(-1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return Packed(tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("name", by_lanes(SURVEYED))
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
            own = torch.tensor(answer.logprobs)
            of_transformers, spread = logprobs_of(oracle, numbers, prompt, answer.token_ids)
            assert ((own - of_transformers).abs() / spread).max() < BOUND
        assert [request.num_migrations for request in requests] == [1] * len(prompts)
