"""What one attempt at a request asks of its workers. Knows nothing of workers or messages."""

from dataclasses import dataclass, replace

from baton.sampling import SamplingParams
from router.intake import Request


@dataclass(frozen=True, slots=True)
class Work:
    """A request, or the rest of it.

    Attributes:
        output: tokens generated already, behind which it goes on; none where there are several
            sequences, which are generated anew.
        params: the request's, but for what was told already.
    """

    request: Request
    output: tuple[int, ...]
    params: SamplingParams

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.request.token_ids + self.output


def work_of(request: Request, output: tuple[int, ...] = (), *, scored: bool = False) -> Work:
    """All of a request, or what is left of it behind some output.

    `scored`: the prompt's log-probabilities were told.
    """
    params = request.params
    if scored and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    return Work(request, output, params)
