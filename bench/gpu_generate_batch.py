"""The engine on a GPU against transformers' `generate_batch` on the same random weights."""

from transformers import GenerationConfig

from bench.gpu_engine import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    prompt_of,
    random_engine,
    random_model,
    tokens_per_second,
)
from bench.gpu_timing import Cases, seconds
from bench.report import Row

_NUM_PROMPTS = 64  # it attends to the KV of all requests, and masks others'
_AIM = 3


def cases() -> Cases:
    """Yields the only case."""
    yield "engine, against generate_batch", _against_generate_batch


def _against_generate_batch() -> list[Row]:
    with random_engine() as (engine, _):
        ours = tokens_per_second(engine, _NUM_PROMPTS)
    del engine  # the model has no room beside it
    theirs = _generate_batch()
    case = f"engine, {_NUM_PROMPTS} prompts of {PROMPT_TOKENS}"
    return [Row(case, ours, "tokens/s", "generate_batch", theirs, ours / theirs, _AIM)]


def _generate_batch() -> float:
    model = random_model("sdpa")
    config = GenerationConfig(
        do_sample=False, max_new_tokens=OUTPUT_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    prompts = [list(prompt_of(PROMPT_TOKENS, i)) for i in range(_NUM_PROMPTS)]

    def generate(some: list[list[int]]) -> None:
        model.generate_batch(inputs=some, generation_config=config)

    generate(prompts[:8])
    return _NUM_PROMPTS * OUTPUT_TOKENS / seconds(lambda: generate(prompts), 1)
