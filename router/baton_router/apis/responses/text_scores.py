"""Log-probabilities of the texts of a response.

The tokens of an answer are also those of its reasoning, its calls and the marks around them; only
those of its texts are told. Which they are is found by their bytes: parts lag behind tokens.
"""

from collections.abc import Iterable, Sequence

from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.answers.sequence_reader import ScoredToken
from baton_router.text.token_bytes import TokenBytes


class TextScores:
    """Scored tokens of one answer that belong to no part yet, in order."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._pending: list[ScoredToken] = []
        self._num_of_call = 0

    def add(self, scored: Sequence[ScoredToken]) -> None:
        """Adds the tokens that follow."""
        del self._pending[: self._num_of_call]
        self._num_of_call = 0
        self._pending += scored

    def take(self, piece: str) -> list[ScoredToken]:
        """Returns the tokens of a piece of text or reasoning; those before it belong to no text."""
        texts = [self._tokens[token.token_id] for token in self._pending]
        written, searched = b"".join(texts), piece.encode()
        # A call that the same tokens end may have the same words in it.
        begin = written.rfind(searched) if self._num_of_call else written.find(searched)
        if begin < 0:  # some of its bytes are no characters
            begin, end = 0, len(written)
        else:
            end = begin + len(searched)
        taken, num_passed, at = [], 0, 0
        for token, text in zip(self._pending, texts, strict=True):
            if at >= end:
                break
            at += len(text)
            num_passed += 1
            if at > begin:
                taken.append(token)
        del self._pending[:num_passed]
        self._num_of_call = 0
        return taken

    def pass_call(self) -> None:
        """Notes that the tokens so far are those of a call, but for a text right after it."""
        self._num_of_call = len(self._pending)

    def entries(self, scored: Iterable[ScoredToken]) -> list[Json]:
        """Returns tokens as the API tells them."""
        return [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(*top) for top in token.top],
            }
            for token in scored
        ]

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        raw = list(self._tokens[token_id])
        return {"token": self._tokens.text(token_id), "logprob": logprob, "bytes": raw}
