"""Output of one sequence as the client sees it: ordered tokens, text, parts, stop string, end.

Knows nothing of workers or messages.
"""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from baton.models.detokenizer import Detokenizer, StopStrings
from baton_router.call.output_delta import OutputDelta
from baton_router.call.parts import Part, Reasoning
from baton_router.call.request_parsing import RequestParsing
from baton_router.lifecycle.answers.reorder_buffer import ReorderBuffer


class Output:
    """Output of one sequence, whose tokens may arrive in any order.

    Args:
        ends: tokens that end it, which are not shown as text.
        parsing: None: there are no parts.
        after: tokens whose text it continues; empty: it begins one.

    Attributes:
        has_ended: no token follows those that are known: a worker reported the end, or a stop
            string was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        ends: Collection[int] = (),
        parsing: RequestParsing | None = None,
        after: Sequence[int] = (),
    ) -> None:
        self.has_ended = False
        self._is_plain = not stop and parsing is None
        self._assembly = ReorderBuffer()
        kept = {} if parsing is None else parsing.kept_tokens
        self._ends = frozenset(ends) - kept.keys()
        self._detokenizer = Detokenizer(tokenizer, kept, after)
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

    def complete(self, delta: OutputDelta) -> None:
        """Replaces the tokens of a delta by those that can be shown now, up to one that completes a
        stop string; adds the text, which may lag behind them, and the parts, which may lag behind
        the text. Raises `UnavailableError` as `ReorderBuffer.accept`."""
        delta.tokens = tokens = self._assembly.accept(delta.tokens)
        if self._is_plain:
            shown = tokens.token_ids
            if shown and shown[-1] in self._ends:
                shown = shown[:-1]
            delta.text = "".join(map(self._detokenizer.push, shown))
            return
        text, parts, parser = "", list[Part](), self._parser
        for index, token_id in enumerate(tokens.token_ids):
            if self._stop.matched is not None:
                delta.tokens = tokens.part(0, index)
                break
            is_end = token_id in self._ends
            new = "" if is_end else self._stop.push(self._detokenizer.push(token_id))
            text += new
            # Token by token, so that parts do not depend on how tokens arrive: a client that
            # resumes has received all that are made of its tokens.
            if parser is not None:
                was_reasoning = parser.is_reasoning
                made = parser.push(new) if new else []
                if was_reasoning or parser.is_reasoning:
                    is_within = was_reasoning and parser.is_reasoning
                    delta.num_reasoning_tokens += is_within or _has_reasoning(made)
                parts += made
        delta.text, delta.parts = text, parts

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


def _has_reasoning(parts: Sequence[Part]) -> bool:
    """Returns whether some of a token that begins or ends reasoning is shown as reasoning."""
    return any(isinstance(part, Reasoning) for part in parts)
