"""One request as the router handles it: what was asked, what it may need at most, what is left to
generate, and its outcome. Plain data; knows nothing of workers, calls or messages but their enums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.sampling import SamplingParams
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.failure import FailureKind
from baton_router.usage import Account

ANONYMOUS = Tenant()

Outputs = Sequence[tuple[int, ...] | None]
"""Tokens generated so far, by sequence index; None for a sequence that has finished."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a request may need.

    Attributes:
        num_tokens: of its prompt.
        max_tokens: of each answer.
        num_answers: sequences that are returned.
        num_sequences: sequences that are generated for them.
    """

    num_tokens: int
    max_tokens: int
    num_answers: int = 1
    num_sequences: int = 1

    @property
    def most_tokens(self) -> int:
        """Prompt tokens, and those of all sequences at `max_tokens` each."""
        return self.num_tokens + self.max_tokens * self.num_sequences

    def tokens_with(self, num_output_tokens: int) -> int:
        """Prompt tokens, and those of all sequences where the answers have `num_output_tokens`
        between them; sequences that are not returned count as long as those that are."""
        return self.num_tokens + num_output_tokens * self.num_sequences // self.num_answers


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request. Its grammar, if it has one, is validated by workers alone.

    Attributes:
        token_ids: the prompt.
        received: the output that the client has already, of each sequence; empty: none of any.
        received_endings: why each is complete with it, as far as the client was told; empty: none
            is.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    received: tuple[tuple[int, ...], ...] = ()
    received_endings: tuple[pb.FinishReason.ValueType, ...] = ()
    tenant: Tenant = ANONYMOUS

    @property
    def demand(self) -> Demand:
        params = self.params
        return Demand(len(self.token_ids), params.max_tokens, params.n, params.num_sequences)

    def tokens_with(self, num_output_tokens: int) -> int:
        """Tokens that this router's workers have computed for it where its answers have
        `num_output_tokens` between them, those included that the client resumed with."""
        num_received = sum(len(token_ids) for token_ids in self.received)
        return self.demand.tokens_with(num_output_tokens - num_received)


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


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Outcome of a request, made once when it ends.

    Attributes:
        finish_reasons: of the sequences that are complete, in their order.
        token_ids: of the same sequences, as they were shown.
        failures: kinds of its failed attempts, in order.
    """

    request: Request
    account: Account
    finish_reasons: tuple[pb.FinishReason.ValueType, ...] = ()
    token_ids: tuple[Sequence[int], ...] = ()
    failures: tuple[FailureKind, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Of all sequences, as far as they were shown, those included that the client resumed
        with."""
        return self.account.num_output_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed for it; 0 if no worker has taken it."""
        if self.account.timings.admitted is None:
            return 0
        return self.request.tokens_with(self.num_output_tokens)

    @property
    def first_token_at(self) -> float | None:
        """When the first token was shown, in monotonic seconds."""
        return self.account.timings.first_token
