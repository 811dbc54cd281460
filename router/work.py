"""What one attempt at a request asks of its workers. Knows nothing of workers or messages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.sampling import SamplingParams
from router.intake import Request

Outputs = Sequence[tuple[int, ...] | None]
"""What each sequence of a request has come to, by its index; None for one that is complete."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request, or the rest of it.

    Attributes:
        output: of its only sequence, the tokens generated already, behind which it goes on.
        outputs: the same of each of several sequences, None for one that is complete. Empty where
            they begin, and where they are ranked: of those nobody knows anything before the end.
        params: the request's, but for what was told already.
    """

    request: Request
    output: tuple[int, ...]
    outputs: tuple[tuple[int, ...] | None, ...]
    params: SamplingParams

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What all its sequences begin with."""
        return self.request.token_ids + self.output

    @property
    def num_sequences(self) -> int:
        """Sequences that are to be generated."""
        return self.params.num_sequences - self.outputs.count(None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, those that they share counted once."""
        return len(self.token_ids) + sum(len(output or ()) for output in self.outputs)


def work_of(request: Request, outputs: Outputs = (), *, scored: bool = False) -> Work:
    """All of a request, or what is left of it behind what its sequences have come to.

    Args:
        outputs: of each sequence, at least one of them not complete; empty: they begin.
        scored: the prompt's log-probabilities were told.
    """
    params = request.params
    if scored and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    if params.num_sequences == 1:
        return Work(request, (outputs[0] or ()) if outputs else (), (), params)
    has_begun = not params.is_ranked and any(output != () for output in outputs)
    return Work(request, (), tuple(outputs) if has_begun else (), params)
