"""Reference: one engine's answers to the prompts that tests hand over."""

import random
from functools import cache
from typing import Any

from baton.engine import LLM, EngineConfig
from baton.sampling import SamplingParams

VOCAB_SIZE = 512


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(5, VOCAB_SIZE) for _ in range(length)]


def engine_of(model: str, **changes: Any) -> LLM:
    config = EngineConfig(device="cpu", dtype="float32", num_blocks=96, max_num_seqs=8, **changes)
    return LLM.from_pretrained(model, config)


def alone(
    model: str, prompts: list[list[int]], params: SamplingParams, **changes: Any
) -> list[list[list[int]]]:
    """The returned sequences of each prompt. Keywords are of the engine's configuration.
    Remembers them, since many tests ask for the same."""
    given = tuple(map(tuple, prompts))
    return [[[*ids] for ids in each] for each in _answers(model, given, params, **changes)]


@cache
def _answers(
    model: str, prompts: tuple[tuple[int, ...], ...], params: SamplingParams, **changes: Any
) -> list[list[tuple[int, ...]]]:
    results = _engine(model, **changes).generate([[*prompt] for prompt in prompts], params)
    return [[c.token_ids for c in r.completions] for r in results]


_engine = cache(engine_of)
