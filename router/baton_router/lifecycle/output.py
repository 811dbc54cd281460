"""One sequence as the client sees it: tokens in order, the text they make, and how it ends.

Knows nothing of workers or messages.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from baton_router.lifecycle.detokenizer import Detokenizer, StopStrings
from baton_router.lifecycle.reorder_buffer import ReorderBuffer, Token


class Output:
    """Takes the tokens of one sequence in any order.

    Attributes:
        has_ended: no token will follow those that are known: the sequence was said to be over, or
            a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.has_ended = False
        self._assembly = ReorderBuffer()
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(stop)

    @property
    def token_ids(self) -> Sequence[int]:
        """What was shown; of a sequence with a stop string, perhaps some behind it."""
        return self._assembly.token_ids

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; nothing is shown from there on."""
        return self._stop.matched

    @property
    def is_complete(self) -> bool:
        """Whether it has ended and nothing before its end is missing."""
        return self._stop.matched is not None or (self.has_ended and not self._assembly.has_gap)

    def push(self, tokens: Sequence[Token]) -> tuple[list[Token], str]:
        """What can be shown now: tokens, up to one that completes a stop string, and text that may
        lag behind them. Raises `UnavailableError` as `ReorderBuffer.accept`."""
        shown: list[Token] = []
        text = ""
        for token in self._assembly.accept(tokens):
            if self._stop.matched is not None:
                break
            shown.append(token)
            text += self._stop.push(self._detokenizer.push(token.token_id))
        return shown, text

    def restart(self) -> None:
        """Others go on with it, behind what was shown or from its beginning."""
        self.has_ended = False
        self._assembly.forget_early()

    def finish(self) -> str:
        """The text that was held back; of a complete sequence, once. It may complete a stop
        string."""
        rest = self._detokenizer.finish() if self._stop.matched is None else ""
        return self._stop.push(rest) + self._stop.finish()
