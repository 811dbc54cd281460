"""Data of one request in the router: parameters, upper bounds of its demand, remaining work,
outcome. Knows nothing of workers, calls or messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams
from baton.serving.tenant import Tenant
from baton_router.call.ending import FinishReason
from baton_router.call.failure import FailureKind
from baton_router.call.prompt import Prompt
from baton_router.call.request_parsing import RequestParsing
from baton_router.call.usage import Account

ANONYMOUS = Tenant()

Outputs = Sequence[tuple[int, ...] | None]
"""Tokens generated so far, by sequence index; None for a sequence that has finished."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Upper bounds of a request's demand.

    Attributes:
        num_tokens: tokens of its prompt.
        max_tokens: tokens of each answer.
        num_answers: sequences that are returned.
        num_sequences: sequences that are generated for them.
        num_together: sequences that continue together or not at all, as beams do.
        sequences_field: sampling parameter that sets `num_sequences`.
    """

    num_tokens: int
    max_tokens: int
    num_answers: int = 1
    num_sequences: int = 1
    num_together: int = 1
    sequences_field: str = "n"

    @property
    def max_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self.num_tokens + self.max_tokens

    def tokens_with(self, num_output_tokens: int) -> int:
        """Returns the tokens of the prompt and of all sequences if the answers have
        `num_output_tokens` in total; sequences that are not returned count as long as those that
        are."""
        return self.num_tokens + num_output_tokens * self.num_sequences // self.num_answers


@dataclass(frozen=True, slots=True)
class Request:
    """Validated request. Only workers validate its grammar, if it has one.

    Attributes:
        token_ids: the prompt.
        received: output that the client already has, of each sequence; empty: no output of any.
        received_endings: finish reasons that the client was told with that output; empty: none.
        parsing: None: the output is text alone.
        model: name of the model that answers.
        encoder_inputs: the prompt's images, in the order of their spans.
        is_clamped: its `max_tokens` are what the prompt leaves of the model's length, fewer than
            its client asked for.
        continues_text: its output continues the prompt's text, in place of answering it.
        content: hash of the weights that `received` is of, as in `WorkerRecord`; empty: unknown.
        prompt: the tokens with their chain hashes.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    received: tuple[tuple[int, ...], ...] = ()
    received_endings: tuple[FinishReason | None, ...] = ()
    tenant: Tenant = ANONYMOUS
    parsing: RequestParsing | None = None
    model: str = ""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    is_clamped: bool = False
    continues_text: bool = False
    content: bytes = b""
    prompt: Prompt = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        images = tuple(each.hashed for each in self.encoder_inputs)
        object.__setattr__(self, "prompt", Prompt(self.token_ids, self.tenant.salt, images))

    @property
    def demand(self) -> Demand:
        params = self.params
        return Demand(
            len(self.token_ids),
            params.max_tokens,
            params.n,
            params.num_sequences,
            params.beam_width or 1,
            params.sequences_field,
        )

    @property
    def most_tokens(self) -> int:
        """The most that workers compute for it: the prompt, and all sequences up to `max_tokens`,
        without the output that the client already has."""
        demand = self.demand
        num_received = sum(map(len, self.received))
        return demand.tokens_with(demand.max_tokens * demand.num_answers - num_received)


@dataclass(frozen=True, slots=True)
class Work:
    """Work that is left of a request: all of it, or the rest.

    Attributes:
        output: for a single sequence, the tokens generated so far, after which it resumes.
        outputs: the same for each of several sequences, None for a complete one. Empty if none has
            begun, and for ranked sequences, whose tokens are unknown before the end.
        params: the request's, without what the client has already been sent.
        prompt: the tokens that all its sequences begin with.
    """

    request: Request
    output: tuple[int, ...]
    outputs: tuple[tuple[int, ...] | None, ...]
    params: SamplingParams
    prompt: Prompt = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        if self.output:
            prompt = prompt.extended(self.output)
        object.__setattr__(self, "prompt", prompt)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that all its sequences begin with."""
        return self.prompt.token_ids

    @property
    def has_begun(self) -> bool:
        """Whether the client has some of it: an output, or log-probabilities of the prompt."""
        are_scored = self.params.prompt_logprobs != self.request.params.prompt_logprobs
        return bool(self.output) or are_scored or any(output != () for output in self.outputs)

    @property
    def num_sequences(self) -> int:
        """Sequences that are left to generate."""
        return self.params.num_sequences - self.outputs.count(None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, shared ones counted once."""
        return len(self.token_ids) + sum(len(output or ()) for output in self.outputs)


def work_of(request: Request, outputs: Outputs = (), *, scored: bool = False) -> Work:
    """Returns all of a request, or the work left after the outputs so far.

    Args:
        outputs: of each sequence, at least one of them not complete; empty: none has begun.
        scored: the client has the prompt's log-probabilities.
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
        finish_reasons: of the complete sequences, by sequence index.
        token_ids: of the same sequences, as they were shown.
        failures: kinds of its failed attempts, in order.
    """

    request: Request
    account: Account
    finish_reasons: tuple[FinishReason, ...] = ()
    token_ids: tuple[Sequence[int], ...] = ()
    failures: tuple[FailureKind, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences that were shown, including those that the client resumed with."""
        return self.account.num_output_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed for it; 0 if no worker admitted it."""
        if self.account.timings.admitted is None:
            return 0
        return self.request.demand.tokens_with(self.account.num_new_tokens)

    @property
    def first_token_at(self) -> float | None:
        """Monotonic seconds when the first token was shown; None if none was."""
        return self.account.timings.first_token
