"""Reader of a request's events as pieces of choices, from which both response formats are made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from baton_router.call.ending import Ending
from baton_router.call.output_delta import OutputDelta
from baton_router.call.parts import Part
from baton_router.call.request import Request
from baton_router.call.tokens import Tokens, TopLogprobs
from baton_router.lifecycle.events import Accepted, ClientEvent, Finished
from baton_router.lifecycle.worker_events import PromptScores


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token with its log-probability in nats, and the most likely ones at its position.

    `logprob` is None for a prompt's first token, which has no predecessor.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceDelta:
    """Piece of one choice, which follows the pieces before it. Made for each token, so it is not
    frozen, which is three times as fast.

    Attributes:
        index: index of the choice.
        tokens: empty unless log-probabilities were asked for; `text` may lag behind them.
        finish_reason: set on the choice's last piece.
        stop_reason: stop string or stop token that ended the choice, if one did.
        parts: of the parsed output; empty unless parsing was asked for.
        token_ids: of its tokens; `text` may lag behind them.
    """

    index: int
    text: str = ""
    tokens: Sequence[ScoredToken] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parts: Sequence[Part] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Prompt that is repeated before each answer.

    Attributes:
        token_ids: the prompt, where its log-probabilities were asked for; else empty.
    """

    text: str
    token_ids: Sequence[int] = ()


class Reader:
    """Reader of the events of one request, whose choices are numbered from `first`.

    Args:
        echo: is repeated before each choice; None: nothing is.
        is_prompt_alone: a choice is what is repeated, without the tokens of the model.

    Attributes:
        accepted: the first event; None until it arrives. Its account is that of now.
        finished: the last event that ended a sequence, with the request's usage.
        num_output_tokens: tokens received so far.
        num_reasoning_tokens: those of reasoning among them.
        clamped_to: maximum tokens of a sequence, if they are fewer than the client asked for.
        prompt_scores: log-probabilities of the prompt, from its second token on, that are not
            repeated; empty unless asked for.
    """

    def __init__(
        self,
        first: int,
        num_choices: int,
        echo: EchoedPrompt | None = None,
        *,
        is_prompt_alone: bool = False,
    ) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.num_output_tokens = self.num_reasoning_tokens = 0
        self.clamped_to: int | None = None
        self.indices = range(first, first + num_choices)
        self._echo = echo
        self._is_prompt_alone = is_prompt_alone
        self._scores: list[ScoredToken] = []
        self.prompt_scores: list[ScoredToken] = []

    def read(self, event: ClientEvent) -> Sequence[SequenceDelta]:
        match event:
            case OutputDelta() if self._is_prompt_alone:
                return []
            case OutputDelta():
                self.num_output_tokens += len(event.tokens)
                self.num_reasoning_tokens += event.num_reasoning_tokens
                return [self._written(event)]
            case Accepted():
                self.accepted = event
                self.note_request(event.request)
                return self._repeated()
            case PromptScores():
                return self._on_scores(event)
            case Finished():
                self.finished, ending = event, event.ending
                if self._is_prompt_alone:
                    index = self.indices[event.sequence_index]
                    return [SequenceDelta(index, finish_reason="length")]
                return [
                    SequenceDelta(
                        self.indices[event.sequence_index],
                        finish_reason=ending.reason.word,
                        stop_reason=_stop_reason(ending),
                    )
                ]

    def note_request(self, request: Request) -> None:
        """Takes what is known of the request before its first event."""
        if request.is_clamped:
            self.clamped_to = request.params.max_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return () if self.accepted is None else self.accepted.request.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Tokens of the prompt that were cached, as far as it is known."""
        return 0 if self.accepted is None else self.accepted.account.num_cached_prompt_tokens

    def _written(self, delta: OutputDelta) -> SequenceDelta:
        index = self.indices[delta.sequence_index]
        tokens = _scored(delta.tokens) if delta.tokens.logprobs else ()
        return SequenceDelta(
            index, delta.text, tokens, parts=delta.parts, token_ids=delta.tokens.token_ids
        )

    def _on_scores(self, scores: PromptScores) -> Sequence[SequenceDelta]:
        begin, is_repeated = scores.position, self._echo is not None and self._echo.token_ids
        ids = self.prompt_token_ids[begin : begin + len(scores.logprobs)]
        scored = map(ScoredToken, ids, scores.logprobs, _tops(scores.tops))
        if is_repeated:
            self._scores += scored
            return self._repeated()
        self.prompt_scores += scored
        return []

    def _repeated(self) -> Sequence[SequenceDelta]:
        """Returns the echoed prompt, once all its log-probabilities are known."""
        if self._echo is None or len(self._scores) < len(self._echo.token_ids) - 1:
            return []
        echo, self._echo = self._echo, None
        first = [ScoredToken(token_id, None) for token_id in echo.token_ids[:1]]
        tokens = (*first, *self._scores)
        return [SequenceDelta(index, echo.text, tokens) for index in self.indices]


def _stop_reason(ending: Ending) -> str | int | None:
    return ending.stop_string if ending.stop_token_id is None else ending.stop_token_id


def _scored(tokens: Tokens) -> Sequence[ScoredToken]:
    return list(map(ScoredToken, tokens.token_ids, tokens.logprobs, _tops(tokens.tops)))


def _tops(tops: Sequence[TopLogprobs]) -> Iterable[tuple[tuple[int, float], ...]]:
    """Returns the most likely tokens at each position; none, as often as is needed, if they were
    not asked for."""
    return [tuple(zip(t.token_ids, t.logprobs, strict=True)) for t in tops] or repeat(())
