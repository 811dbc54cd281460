"""Context length: the maximum tokens of a sequence, by its model and by the KV pools of workers.

Independent of engines and of the fleet, which report the two lengths.
"""

from dataclasses import dataclass, replace

from baton.errors import ContextLengthError

POOL_SETTINGS = "--kv-cache-bytes or --num-blocks"
"""Settings of a worker that enlarge its KV pool."""

_MAX_TOKENS = "sampling.max_tokens"


@dataclass(frozen=True, slots=True)
class ContextLength:
    """Maximum tokens of a sequence, prompt and output together.

    Attributes:
        model: by the model, or by `--max-model-len`.
        pool: those of one sequence that the KV pool of the largest worker has room for; None: no
            pool bounds a sequence.
    """

    model: int
    pool: int | None = None

    @property
    def num_tokens(self) -> int:
        """The smaller one of the two lengths."""
        return self.model if self.pool is None else min(self.model, self.pool)

    @property
    def is_bound_by_pool(self) -> bool:
        """Whether the KV pool has room for less than the model takes."""
        return self.num_tokens < self.model

    @property
    def remedy(self) -> str:
        """Sentence on the KV pool, where that is the bound; else empty."""
        if not self.is_bound_by_pool:
            return ""
        return (
            f"The KV pool of the largest worker has room for {self.pool} tokens of a sequence; the "
            f"model takes {self.model}. Enlarge the pool by {POOL_SETTINGS} of the worker."
        )

    def within(self, model: int) -> "ContextLength":
        """Returns this length for a model, or a checkpoint, of `model` tokens."""
        return replace(self, model=min(self.model, model))

    def check(
        self, num_prompt_tokens: int, max_tokens: int, prompt_field: str = "token_ids"
    ) -> None:
        """Raises `ContextLengthError` unless prompt and output fit together; it names
        `prompt_field` if no output would fit."""
        if num_prompt_tokens >= self.num_tokens:
            problem = f"has {num_prompt_tokens} tokens; {self._longest}. Shorten the prompt."
            raise self._error(prompt_field, problem, num_prompt_tokens)
        if num_prompt_tokens + max_tokens > self.num_tokens:
            problem = (
                f"is {max_tokens}, and the prompt has {num_prompt_tokens} tokens; "
                f"{self._longest}. Lower it, or shorten the prompt."
            )
            raise self._error(_MAX_TOKENS, problem, num_prompt_tokens + max_tokens)

    def check_least(self, num_prompt_tokens: int, prompt_field: str) -> None:
        """Raises `ContextLengthError` for a text that has so many tokens at least, if no output
        would fit."""
        if num_prompt_tokens >= self.num_tokens:
            problem = f"has {num_prompt_tokens} tokens or more by its bytes; {self._longest}"
            raise self._error(prompt_field, f"{problem}. Shorten the prompt.", num_prompt_tokens)

    def check_max_tokens(self, max_tokens: int) -> None:
        """Raises `ContextLengthError` if `max_tokens` leave no room for any prompt."""
        if max_tokens >= self.num_tokens:
            problem = f"is {max_tokens}; {self._longest}. Lower it."
            raise self._error(_MAX_TOKENS, problem, max_tokens)

    @property
    def _longest(self) -> str:
        """The bound, in the words by which clients know what to do."""
        return (
            f"this model's maximum context length is {self.num_tokens} tokens, prompt and output "
            "together"
        )

    def _error(self, field: str, problem: str, size: int) -> ContextLengthError:
        problem = f"{problem} {self.remedy}".rstrip()
        return ContextLengthError(field, problem, size, self.num_tokens, remedy=self.remedy)
