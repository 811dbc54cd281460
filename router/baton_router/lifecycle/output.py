"""Output of one sequence as the client sees it: ordered tokens, their text, stop string, end.

Knows nothing of workers or messages.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from baton_router.lifecycle.detokenizer import Detokenizer, StopStrings
from baton_router.lifecycle.reorder_buffer import ReorderBuffer, Token


class Output:
    """Output of one sequence, whose tokens may arrive in any order.

    Attributes:
        has_ended: no token follows those that are known: a worker reported the end, or a stop
            string was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.has_ended = False
        self._assembly = ReorderBuffer()
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(stop)

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

    def push(self, tokens: Sequence[Token]) -> tuple[list[Token], str]:
        """Returns what can be shown now: tokens, up to one that completes a stop string, and text
        that may lag behind them. Raises `UnavailableError` as `ReorderBuffer.accept`."""
        shown: list[Token] = []
        text = ""
        for token in self._assembly.accept(tokens):
            if self._stop.matched is not None:
                break
            shown.append(token)
            text += self._stop.push(self._detokenizer.push(token.token_id))
        return shown, text

    def restart(self) -> None:
        """Prepares for other workers, which resume after the shown tokens or from the beginning."""
        self.has_ended = False
        self._assembly.forget_early()

    def finish(self) -> str:
        """Returns the text that was held back; for a complete sequence, once. It may complete a
        stop string."""
        rest = self._detokenizer.finish() if self._stop.matched is None else ""
        return self._stop.push(rest) + self._stop.finish()
