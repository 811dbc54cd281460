"""Answer to one request, assembled from both workers' events in any order of arrival.

Awaits nothing; knows nothing of calls or their failures.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.errors import InternalError
from baton_router.call.ending import Ending, FinishReason
from baton_router.call.failure import FailureKind
from baton_router.call.output_delta import OutputDelta
from baton_router.call.parts import Part, Text, ToolCallStart, joined
from baton_router.call.request import Request, RequestOutcome, Work, work_of
from baton_router.call.tokens import Tokens
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle.answers.output import Output
from baton_router.lifecycle.attempts.work_bounds import WorkBounds
from baton_router.lifecycle.events import ClientEvent, Finished
from baton_router.lifecycle.worker_events import (
    KvReady,
    PrefillResult,
    PrefillStarted,
    PromptScores,
    Received,
    SequenceEnded,
    StartedAlone,
)
from baton_router.text.model_card import ModelCard

# Seconds after the handoff for which a loss of a ranked answer counts as one at its beginning.
_UNSEEN_SECONDS = 1.0


class Answer:
    """Answer to one request, of one or several sequences.

    Attributes:
        is_prefilling: the prefill worker is computing the prompt.
        is_handed_over: the decode worker holds the prompt's blocks, or computes them itself.
        num_sequences: sequences that the client gets.
        bounds: of what workers may send for it.
    """

    def __init__(
        self,
        request: Request,
        card: ModelCard,
        arrived: float,
        on_first_token: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Takes `on_first_token`, which is called once with the moment in monotonic seconds."""
        params = request.params
        self.is_prefilling = False
        self.is_handed_over = False
        self.num_sequences = params.n
        self.bounds = WorkBounds.of(request, card.vocab_size)
        self._on_first_token = on_first_token
        self._request = request
        self._eos_token_ids = frozenset() if params.ignore_eos else card.eos_token_ids
        self._account = Account(Timings(arrived), len(request.token_ids))
        ends = self._eos_token_ids.union(params.stop_token_ids)
        after = request.token_ids if request.continues_text else ()
        self._outputs = [
            Output(card.tokenizer, params.stop, ends, request.parsing, after)
            for _ in range(params.n)
        ]
        self._told_endings = _endings_of(request.received_endings)
        self._endings: dict[int, Ending] = {}
        self._unfinished = set(range(params.n))
        self._is_ranked = params.is_ranked
        self._surplus: set[int] = set()
        self._known_surplus: set[int] = set()
        # For several sequences the decode worker chooses the first tokens.
        self._takes_first_token = params.num_sequences == 1
        self._awaits_prompt = params.prompt_logprobs is not None
        self._num_scored = 1  # The first token of a prompt has no log-probability.
        self._is_alone = False  # the decode worker computes the prompt in this attempt
        self._held_back: list[Received] = []
        self._handed_over_at = math.inf
        self._take_received(request.received)

    @property
    def is_complete(self) -> bool:
        return not self._unfinished

    @property
    def is_known(self) -> bool:
        """True if the shown tokens are the whole answer, though its end was not sent."""
        return all(self._known_ending(index) is not None for index in self._unfinished)

    @property
    def account(self) -> Account:
        """Usage and timings of the request so far."""
        return self._account

    @property
    def handed_over_at(self) -> float | None:
        """Monotonic seconds when the decode worker had the prompt's blocks; None if it has not
        received them in this attempt."""
        return self._handed_over_at if self.is_handed_over else None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences that were shown."""
        return self._account.num_output_tokens

    @property
    def place(self) -> int | None:
        """Output tokens that the attempt has reached, including those it resumed after.

        Ranked sequences are seen only at their end: 0 until 1 s after the handoff, then None.
        """
        if self._is_ranked and time.monotonic() - self._handed_over_at > _UNSEEN_SECONDS:
            return None
        return self.num_output_tokens

    def outcome(self, failures: Sequence[FailureKind] = ()) -> RequestOutcome:
        """Returns the outcome of the request, given the `failures` of its attempts."""
        complete = sorted(set(range(len(self._outputs))) - self._unfinished)
        return RequestOutcome(
            self._request,
            self._account,
            tuple(map(self.finish_reason, complete)),
            tuple(self._outputs[index].token_ids for index in complete),
            tuple(failures),
        )

    # From attempt to attempt.

    def work(self) -> Work:
        """Returns the work that is left."""
        shown = [tuple(output.token_ids) for output in self._outputs]
        left = self._unfinished
        if len(shown) > 1:  # a single one is incomplete, or no attempt would follow
            left = {index for index in left if self._known_ending(index) is None}
        outputs = [ids if index in left else None for index, ids in enumerate(shown)]
        return work_of(self._request, outputs, scored=not self._awaits_prompt)

    def admitted(self) -> None:
        """Records that all workers admitted the request, or on migration the rest of it."""
        if self._account.timings.admitted is None:
            self._account.timings.admitted = time.monotonic()
        else:
            self._account.num_migrations += 1

    def restart(self) -> None:
        """Resets the state of the failed attempt; other workers resume after the shown tokens."""
        self.is_prefilling = self.is_handed_over = self._is_alone = False
        self._handed_over_at = math.inf
        self._held_back.clear()
        self._surplus.clear()
        self._known_surplus.clear()
        for index in self._unfinished:
            self._endings.pop(index, None)
            self._outputs[index].restart()

    def conclude(self) -> list[ClientEvent]:
        """Finishes the sequences whose shown tokens reach their end; returns client events."""
        responses: list[ClientEvent] = []
        for index in sorted(self._unfinished):
            ending = self._known_ending(index)
            if ending is not None:
                responses += self._end(index, ending)
        return responses

    # The workers' events.

    def on_event(self, event: Received) -> list[ClientEvent]:
        """Applies an event of one of the workers; returns the client's events.

        Raises `UnavailableError` if it contradicts the tokens already shown.
        """
        match event:
            case OutputDelta():
                return self._on_tokens(event)  # hot path
            case PrefillStarted():
                self.is_prefilling = True
                self._on_started(event)
            case PromptScores():
                return self._on_scores(event)
            case PrefillResult():
                self.is_prefilling = False
                return self._on_result(event)
            case KvReady():
                self._hand_over()
                blocks = event.num_blocks, event.num_bytes, event.num_reused_blocks
                self._account.handed_over(event.exposed_seconds, *blocks)
            case StartedAlone():
                self._is_alone = True
                self._hand_over()
                self._end_scores_alone()
                self._on_started(event.started)
            case SequenceEnded():
                if not self._awaits_prompt:
                    return self._end(event.sequence_index, event.ending)
                self._held_back.append(event)
        return []

    def _on_started(self, event: PrefillStarted) -> None:
        self._account.started(event.queue_seconds, event.elapsed, event.num_cached_tokens)

    def _hand_over(self) -> None:
        self.is_handed_over, self._handed_over_at = True, time.monotonic()

    def take_surplus(self) -> set[int]:
        """Returns the sequences that the decode worker still generates though they are complete
        here, each once per attempt. Empty if all are complete, which ends the attempt."""
        if not self._surplus:
            return set()
        surplus, self._surplus = self._surplus - self._known_surplus, set()
        self._known_surplus |= surplus
        return set() if self.is_complete else surplus

    def finish_reason(self, index: int) -> FinishReason:
        """Returns the finish reason of a complete sequence."""
        return self._ending(index).reason

    def _on_tokens(self, delta: OutputDelta) -> list[ClientEvent]:
        if self._awaits_prompt:
            self._held_back.append(delta)
            return []
        index, continues = delta.sequence_index, not delta.finish_reason
        responses = self._show(delta)
        if continues and index not in self._unfinished and not self._is_ranked:
            self._surplus.add(index)
        return responses

    def _on_scores(self, scores: PromptScores) -> list[ClientEvent]:
        new = scores.after(self._num_scored)
        self._num_scored = max(self._num_scored, scores.position + len(scores.logprobs))
        self._end_scores_alone()
        return [] if new is None else [new]

    def _end_scores_alone(self) -> None:
        """Awaits the prompt no longer once it is scored by a decode worker alone, which sends its
        tokens after the scores and no result."""
        if self._is_alone and self._num_scored >= len(self._request.token_ids):
            self._awaits_prompt = False

    def _on_result(self, result: PrefillResult) -> list[ClientEvent]:
        self._awaits_prompt = False
        responses: list[ClientEvent] = []
        if self._takes_first_token:
            if len(result.first_tokens) != 1:
                num_tokens = len(result.first_tokens)
                raise InternalError(f"a prefill brought {num_tokens} first tokens, not one")
            responses += self._show(result.first_tokens[0])
        held, self._held_back = self._held_back, []
        for event in held:
            responses += self.on_event(event)
        return responses

    # One sequence.

    def _take_received(self, received: tuple[tuple[int, ...], ...]) -> None:
        """Starts after the tokens, and their text, that the client received in an earlier call."""
        for index, token_ids in enumerate(received[: len(self._outputs)]):
            delta = OutputDelta(index, Tokens(0, list(token_ids)))
            self._outputs[index].complete(delta)
            self._account.num_output_tokens += len(delta.tokens)
            self._account.num_received_tokens += len(delta.tokens)

    def _show(self, delta: OutputDelta) -> list[ClientEvent]:
        """Shows the tokens of a delta, and completes it. Its `finish_reason` is why the sequence
        ends with the last of them, if it does. A stop string ends it with the token that completes
        it; later tokens are ignored."""
        index = delta.sequence_index
        if index not in self._unfinished:
            return []
        output = self._outputs[index]
        # For beams the reason comes without the score.
        if delta.finish_reason and not self._request.params.beam_width:
            self._endings.setdefault(index, Ending(delta.finish_reason))
            output.has_ended = True
        output.complete(delta)
        is_complete = output.is_complete
        delta.finish_reason = self.finish_reason(index) if is_complete else None
        responses: list[ClientEvent] = []
        if delta.tokens.token_ids:
            if self._account.timings.first_token is None:
                self._account.timings.first_token = moment = time.monotonic()
                self._on_first_token(moment)
            self._account.num_output_tokens += len(delta.tokens.token_ids)
            if delta.parts:
                delta.parts = self._with_ids(index, delta.parts)
            responses.append(delta)
        return responses + self._finish(index) if is_complete else responses

    def _end(self, index: int, ending: Ending) -> list[ClientEvent]:
        """Records the end of a sequence: no token follows those already in flight."""
        if index not in self._unfinished or index in self._endings:
            return []
        self._endings[index] = ending
        output = self._outputs[index]
        output.has_ended = True
        return self._finish(index) if output.is_complete else []

    def _known_ending(self, index: int) -> Ending | None:
        """Returns the ending that the shown tokens imply, or that the client was told with them;
        else None. Tokens of beams do not imply the score."""
        params, output = self._request.params, self._outputs[index]
        if output.stop_string is not None:
            return Ending(FinishReason.STOP_STRING, output.stop_string)
        if params.beam_width or not output.token_ids:
            return None
        if index in self._told_endings:
            return self._told_endings[index]
        last = output.token_ids[-1]
        if last in self._eos_token_ids:
            return Ending(FinishReason.END_OF_SEQUENCE)
        if last in params.stop_token_ids:
            return Ending(FinishReason.STOP_TOKEN)
        if len(output.token_ids) >= params.max_tokens:
            return Ending(FinishReason.LENGTH)
        return None

    def _finish(self, index: int) -> list[ClientEvent]:
        output = self._outputs[index]
        self._unfinished.remove(index)
        self._account.timings.finished = time.monotonic()
        rest, parts = output.finish()
        finished = Finished(index, self._ending(index), self._account.snapshot())
        if not (rest or parts):
            return [finished]
        held = OutputDelta(index, Tokens(0, []), rest, parts=self._with_ids(index, parts))
        return [held, finished]

    def _with_ids(self, index: int, parts: Sequence[Part]) -> Sequence[Part]:
        """Returns the parts of a sequence with ids of calls, adjacent pieces as one part."""
        parsing = self._request.parsing
        if parsing is None or not parts or (len(parts) == 1 and isinstance(parts[0], Text)):
            return parts
        return [
            replace(part, id=parsing.call_id(self._request.request_id, index, part.index))
            if isinstance(part, ToolCallStart)
            else part
            for part in joined(parts)
        ]

    def _ending(self, index: int) -> Ending:
        """Returns the ending of a complete sequence."""
        output = self._outputs[index]
        if output.stop_string is not None:
            return Ending(FinishReason.STOP_STRING, output.stop_string)
        ending = self._endings[index]
        # A worker that is wrong may name a stop token before the first token.
        if ending.reason == FinishReason.STOP_TOKEN and output.token_ids:
            return replace(ending, stop_token_id=output.token_ids[-1])
        return ending


def _endings_of(reasons: Sequence[FinishReason | None]) -> dict[int, Ending]:
    """Returns the endings that the client was told, by sequence index."""
    return {i: Ending(reason) for i, reason in enumerate(reasons) if reason is not None}
