"""Warm-up of an engine on the CPU, as one on a GPU has it at load."""

from baton.engine.executor.warm_up import warm_up
from baton.engine.llm import LLM


def warm(engine: LLM) -> None:
    """Launches all that serving launches, in the sizes that the engine's config has on a GPU."""
    runner, config = engine.core.runner, engine.core.config
    warm_up(
        runner.model,
        runner.attention,
        runner.attention,
        runner.head.sampler,
        engine.core.cache,
        num_tokens=config.tokens_per_step("cuda"),
        max_len=engine.core.facts.info.max_model_len,
        num_rows=config.max_num_seqs,
    )
