"""The engine on a GPU against transformers' `generate_batch` on the same random weights."""

from functools import partial

from transformers import GenerationConfig

from bench.gpu_engine import prompt_of, random_engine, random_model, tokens_per_second
from bench.gpu_timing import Bench, Cases
from bench.report import Row

_AIM = 3


def cases(bench: Bench) -> Cases:
    """Yields the only case."""
    yield "engine, against generate_batch", partial(_against_generate_batch, bench)


def _against_generate_batch(bench: Bench) -> list[Row]:
    sizes = bench.sizes.engine
    with random_engine(bench, sizes.model) as (engine, _):
        ours = tokens_per_second(sizes, engine, sizes.num_masked_prompts)
    del engine  # the model has no room beside it
    theirs = _generate_batch(bench)
    case = f"engine, {sizes.num_masked_prompts} prompts of {sizes.prompt_tokens}"
    return [Row(case, ours, "tokens/s", "generate_batch", theirs, ours / theirs, _AIM)]


def _generate_batch(bench: Bench) -> float:
    sizes = bench.sizes.engine
    model = random_model("sdpa", sizes.model, bench.device.name)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=sizes.output_tokens, eos_token_id=-1, pad_token_id=0
    )
    count = sizes.num_masked_prompts
    prompts = [list(prompt_of(sizes, sizes.prompt_tokens, i)) for i in range(count)]

    def generate(some: list[list[int]]) -> None:
        model.generate_batch(inputs=some, generation_config=config, **sizes.generate_batch)

    generate(prompts[:8])
    elapsed = bench.device.seconds(lambda: generate(prompts), 1)
    return count * sizes.output_tokens / elapsed
