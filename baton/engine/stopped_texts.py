"""Stop strings of offline batches: the texts of a request's sequences, up to the first of them."""

from collections.abc import Callable, Collection, Sequence

from tokenizers import Tokenizer

from baton.engine.outputs import SequenceUpdate
from baton.models.detokenizer import Detokenizer, StopStrings


class StoppedText:
    """Text of one sequence, which continues that of its prompt.

    Args:
        ends: tokens that are no part of it.

    Attributes:
        shown: the text before the stop string.
        num_tokens: tokens so far, at most those with which the stop string is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        ends: Collection[int],
        stop: Sequence[str],
    ) -> None:
        self.shown = ""
        self.num_tokens = 0
        self._ends = ends
        self._detokenizer = Detokenizer(tokenizer, after=prompt)
        self._stop = StopStrings(stop)

    @property
    def has_stopped(self) -> bool:
        return self._stop.matched is not None

    def push(self, update: SequenceUpdate) -> bool:
        """Adds an update that came before the stop string; returns whether it is there now."""
        if update.token_id is not None:
            self.num_tokens += 1
        if update.token_id is not None and update.token_id not in self._ends:
            self.shown += self._stop.push(self._detokenizer.push(update.token_id))
        if update.finish_reason is not None:
            self.shown += self._stop.push(self._detokenizer.finish()) + self._stop.finish()
        return self.has_stopped


class StoppedTexts(dict[int, StoppedText]):
    """Texts of a request with stop strings, by sequence index."""

    def __init__(self, new: Callable[[], StoppedText], on_stop: Callable[[int], None]) -> None:
        """Takes `new`, which begins a text, and `on_stop`, which is called with a sequence's index
        once its text has a stop string."""
        self._new = new
        self._on_stop = on_stop

    def push(self, update: SequenceUpdate) -> None:
        text = self.setdefault(update.index, self._new())
        if not text.has_stopped and text.push(update):
            self._on_stop(update.index)
