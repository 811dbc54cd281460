"""Check of the KV pools of workers: whether each has room for a sequence of its model's length."""

from collections.abc import Iterator, Mapping

from baton.cli.checks.finding import Finding, note, ok
from baton.client.types import WorkerFacts
from baton.context_length import POOL_SETTINGS, ContextLength

_ADVICE = (
    f"longer requests are refused: raise {POOL_SETTINGS} of the worker, or lower its "
    "--max-model-len"
)


def pools(facts: Mapping[str, WorkerFacts]) -> Iterator[Finding]:
    """Notes workers, of these by name, whose pool has room for fewer tokens than the model takes.
    Pools that bound no sequence, and of older workers, are none of them."""
    lengths = {
        name: ContextLength(fact.max_model_len, fact.num_pool_tokens)
        for name, fact in facts.items()
        if fact.num_pool_tokens
    }
    small = {name: length for name, length in lengths.items() if length.is_bound_by_pool}
    for name, length in small.items():
        text = f"has room for {length.num_tokens:,} tokens; the model takes {length.model:,}"
        yield note(f"KV pool of {name}", text, _ADVICE)
    if lengths and not small:
        yield ok("KV pools", "have room for a sequence of the model's length")
