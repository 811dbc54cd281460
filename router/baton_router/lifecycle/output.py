"""Output of one sequence as the client sees it: ordered tokens, text, parts, stop string, end.

Knows nothing of workers or messages.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from baton_router.lifecycle.detokenizer import Detokenizer, StopStrings
from baton_router.lifecycle.reorder_buffer import ReorderBuffer
from baton_router.lifecycle.tokens import Tokens
from baton_router.output_parsing.parts import Part, Reasoning
from baton_router.output_parsing.request_parsing import RequestParsing


class Output:
    """Output of one sequence, whose tokens may arrive in any order.

    Attributes:
        has_ended: no token follows those that are known: a worker reported the end, or a stop
            string was found.
        num_reasoning_tokens: shown tokens of reasoning, without the marks before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], parsing: RequestParsing | None = None
    ) -> None:
        """`parsing` None: there are no parts."""
        self.has_ended = False
        self.num_reasoning_tokens = 0
        self._is_reasoning = False
        self._assembly = ReorderBuffer()
        self._detokenizer = Detokenizer(tokenizer, {} if parsing is None else parsing.kept_tokens)
        self._stop = StopStrings(stop)
        self._parser = None if parsing is None else parsing.parser()

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens that were shown; with a stop string perhaps some after it."""
        return self._assembly.token_ids

    @property
    def stop_string(self) -> str | None:
        """Stop string that was found; no text is shown from there on."""
        return self._stop.matched

    @property
    def is_complete(self) -> bool:
        """True if it has ended and no token before its end is missing."""
        return self._stop.matched is not None or (self.has_ended and not self._assembly.has_gap)

    def push(self, tokens: Tokens) -> tuple[Tokens, str, list[Part]]:
        """Returns what can be shown now: tokens, up to one that completes a stop string, text that
        may lag behind them, and parts that may lag behind the text. Raises `UnavailableError` as
        `ReorderBuffer.accept`."""
        ready = self._assembly.accept(tokens)
        parts: list[Part] = []
        text = ""
        for index, token_id in enumerate(ready.token_ids):
            if self._stop.matched is not None:
                return ready.part(0, index), text, parts
            new = self._stop.push(self._detokenizer.push(token_id))
            text += new
            # Token by token, so that parts do not depend on how tokens arrive: a client that
            # resumes has received all that are made of its tokens.
            if self._parser is not None:
                made = self._parser.push(new) if new else []
                self._count_reasoning(made)
                parts += made
        return ready, text, parts

    def _count_reasoning(self, parts: Sequence[Part]) -> None:
        """Counts a token as reasoning by the parts that it completed; if none, by those before."""
        is_counted = self._is_reasoning and not parts
        for part in parts:
            self._is_reasoning = isinstance(part, Reasoning)
            is_counted = is_counted or self._is_reasoning
        self.num_reasoning_tokens += is_counted

    def restart(self) -> None:
        """Prepares for other workers, which resume after the shown tokens or from the beginning."""
        self.has_ended = False
        self._assembly.forget_early()

    def finish(self) -> tuple[str, list[Part]]:
        """Returns the text and the parts that were held back; for a complete sequence, once. The
        text may complete a stop string."""
        rest = self._detokenizer.finish() if self._stop.matched is None else ""
        text = self._stop.push(rest) + self._stop.finish()
        if self._parser is None:
            return text, []
        return text, [*self._parser.push(text), *self._parser.finish()]
