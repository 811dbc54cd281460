"""What the client is to see of a request: made of the workers' events, in whatever order they come.

Awaits nothing, and knows nothing of calls or of how they fail.
"""

import time

from baton.v1 import decode_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from router import wire
from router.assembly import Token
from router.intake import Request
from router.model_card import ModelCard
from router.output import Output


class Answer:
    """The answer to one request, of one sequence or several.

    Attributes:
        is_handed_over: the decode worker holds the prompt's blocks.
    """

    def __init__(self, request: Request, card: ModelCard, arrived: float) -> None:
        params = request.params
        self.is_handed_over = False
        self._account = wire.Account(wire.Timings(arrived), len(request.token_ids))
        self._outputs = [Output(card.tokenizer, params.stop) for _ in range(params.n)]
        self._endings: dict[int, wire.Ending] = {}
        self._unfinished = set(range(params.n))
        # Of several sequences the decode worker chooses the first tokens.
        self._takes_first_token = params.num_sequences == 1
        self._awaits_prompt = params.prompt_logprobs is not None
        self._held_back: list[decode_pb2.DecodeGenerateResponse] = []

    @property
    def is_complete(self) -> bool:
        return not self._unfinished

    @property
    def needs_prefill(self) -> bool:
        """Whether the prefill worker still has what only it can tell, or blocks that are needed."""
        return self._awaits_prompt or not self.is_handed_over

    def admitted(self) -> None:
        """Both workers have taken the request."""
        self._account.timings.admitted = time.monotonic()

    def on_prefill(self, event: prefill_pb2.PrefillResponse) -> list[pb.GenerateResponse]:
        """Books an event of the prefill worker; returns what the client is to see of it."""
        kind = event.WhichOneof("event")
        if kind == "started":
            self._account.timings.prefill_queue_s = wire.seconds(event.started.queue_time)
            self._account.num_cached_prompt_tokens = event.started.num_cached_tokens
        elif kind == "prompt_logprobs":
            return [wire.prompt_logprobs(event.prompt_logprobs)]
        elif kind == "result":
            return self._on_result(event.result)
        return []

    def on_decode(self, event: decode_pb2.DecodeGenerateResponse) -> list[pb.GenerateResponse]:
        """Books an event of the decode worker; returns what the client is to see of it."""
        kind = event.WhichOneof("event")
        if kind == "kv_ready":
            self.is_handed_over = True
            self._account.kv_ready = event.kv_ready
            self._account.timings.exposed_transfer_s = wire.seconds(event.kv_ready.exposed)
        elif self._awaits_prompt:
            self._held_back.append(event)
        elif kind == "tokens":
            return self._show(event.tokens.sequence_index, wire.decoded_tokens(event.tokens))
        elif kind == "finished":
            return self._end(event.finished.sequence_index, wire.ending(event.finished))
        return []

    def _on_result(self, result: prefill_pb2.PrefillResult) -> list[pb.GenerateResponse]:
        self._awaits_prompt = False
        responses = []
        if self._takes_first_token:
            responses += self._show(0, wire.first_tokens(result))
            reason = result.first_tokens[0].finish_reason
            if reason != pb.FINISH_REASON_UNSPECIFIED:
                responses += self._end(0, wire.Ending(reason))
        held, self._held_back = self._held_back, []
        for event in held:
            responses += self.on_decode(event)
        return responses

    def _show(self, index: int, tokens: list[Token]) -> list[pb.GenerateResponse]:
        """A stop string ends the sequence with the token completing it; what follows is ignored."""
        if index not in self._unfinished:
            return []
        output = self._outputs[index]
        shown, text = output.push(tokens)
        if not shown:
            return []
        if self._account.timings.first_token is None:
            self._account.timings.first_token = time.monotonic()
        self._account.num_output_tokens += len(shown)
        responses = [wire.chunk(index, shown, text)]
        if output.is_complete:
            responses += self._finish(index)
        return responses

    def _end(self, index: int, ending: wire.Ending) -> list[pb.GenerateResponse]:
        """No token will follow those that are on their way."""
        if index not in self._unfinished or index in self._endings:
            return []
        self._endings[index] = ending
        output = self._outputs[index]
        output.has_ended = True
        return self._finish(index) if output.is_complete else []

    def _finish(self, index: int) -> list[pb.GenerateResponse]:
        output = self._outputs[index]
        self._unfinished.remove(index)
        self._account.timings.finished = time.monotonic()
        rest = output.finish()
        ending = (
            self._endings[index]
            if output.stop_string is None
            else wire.Ending(pb.FINISH_REASON_STOP_STRING, output.stop_string)
        )
        finished = wire.finished(index, ending, self._account)
        return [wire.chunk(index, [], rest), finished] if rest else [finished]
