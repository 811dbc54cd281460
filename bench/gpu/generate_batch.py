"""The engine on a GPU against transformers' `generate_batch` on the same random weights."""

from functools import partial

from transformers import GenerationConfig

from bench.gpu.engine import prompt_of, random_engine, random_model, tokens_per_second
from bench.gpu.timing import Bench, Cases, free_memory
from bench.report import Row

_AIM = 3


def cases(bench: Bench) -> Cases:
    """Yields the only case."""
    yield "engine, against generate_batch", partial(_against_generate_batch, bench)


def _against_generate_batch(bench: Bench) -> list[Row]:
    sizes = bench.sizes.engine
    with random_engine(bench, sizes.model) as (engine, _):
        ours = tokens_per_second(sizes, engine, sizes.num_masked_prompts)
    del engine
    free_memory()  # the model has no room beside the engine
    theirs = _generate_batch(bench)
    case = f"engine, {sizes.num_masked_prompts} prompts of {sizes.prompt_tokens}"
    return [Row(case, ours, "tokens/s", "generate_batch", theirs, ours / theirs, _AIM)]


def _generate_batch(bench: Bench) -> float:
    """Returns the tokens per second of the second pass of two: the first prepares. Raises
    `RuntimeError` unless it returns all of them: it logs its errors, and returns what it has."""
    sizes = bench.sizes.engine
    model = random_model("sdpa", sizes.model, bench.device.name)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=sizes.output_tokens, eos_token_id=-1, pad_token_id=0
    )
    count = sizes.num_masked_prompts
    expected = count * sizes.output_tokens

    def generate(first_seed: int) -> None:
        seeds = range(first_seed, first_seed + count)  # others each time: it keeps prefixes
        prompts = [list(prompt_of(sizes, sizes.prompt_tokens, seed)) for seed in seeds]
        outputs = model.generate_batch(
            prompts, config, persistent_manager=True, **sizes.generate_batch
        )
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        if num_tokens != expected:
            raise RuntimeError(f"it returned {num_tokens} of {expected} tokens; the log says why")

    generate(0)
    return expected / bench.device.seconds(lambda: generate(count), 1)
