"""Answers of engines held to those of transformers: alone, in a batch, in chunks, over prefixes."""

from collections.abc import Mapping
from typing import Any, Final

from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import MAX_LEN, VOCAB_SIZE
from tests.support.engine.engines import assert_idle, load, tokens
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import NUM_TOKENS, awkward_prompts

GREEDY: Final = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
WAYS: Final[Mapping[str, Mapping[str, int]]] = {
    "alone": {"max_num_batched_tokens": MAX_LEN, "max_num_seqs": 1},
    "in a batch": {"max_num_batched_tokens": 4 * MAX_LEN, "max_num_seqs": 8},
    "in chunks": {"max_num_batched_tokens": 17, "max_num_seqs": 3},
}
"""Settings by which prompts are computed."""


def assert_answers(
    path: str, oracle: Oracle, read: str, vocab_size: int = VOCAB_SIZE, **settings: Any
) -> None:
    """Asserts that tokens and log-probabilities of a checkpoint are those of transformers with
    another one, in every way, and again with prefixes cached."""
    prompts = awkward_prompts(vocab_size, seed=1)  # of no format is a choice a toss-up
    expected = [oracle(read, prompt, NUM_TOKENS) for prompt in prompts]
    for way, limits in WAYS.items():
        engine = load(path, **limits, **settings)
        for _ in range(2):
            results = engine.generate(prompts, GREEDY)
            assert tokens(results) == expected, way
            for prompt, result in zip(prompts, results, strict=True):
                oracle.check_logprobs(read, prompt, result.token_ids, result.logprobs)
        assert_idle(engine)
