"""Drafter that knows what will come."""

import numpy as np

from baton.engine.scheduler.sequences.prompt_lookup import DraftRequest
from tests.support.engine.checkpoints import VOCAB_SIZE


class OracleDrafter:
    """Drafts what will come, with every `wrong`-th guess wrong: accepted and rejected in turns."""

    def __init__(
        self,
        expected: dict[str, tuple[int, ...]],
        prompts: dict[str, int],
        wrong: int = 3,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._expected = expected
        self._num_prompt = prompts
        self._wrong = wrong
        self._vocab_size = vocab_size
        self._count = 0

    def propose(self, requests: list[DraftRequest]) -> list[np.ndarray]:
        return [self._guess(r) for r in requests]

    def _guess(self, draft: DraftRequest) -> np.ndarray:
        name = draft.sequence_id.rsplit(".", 1)[0]
        done = len(draft.token_ids) - self._num_prompt[name]
        guesses = list(self._expected[name][done : done + draft.max_drafts])
        for i in range(len(guesses)):
            self._count += 1
            if self._count % self._wrong == 0:
                guesses[i] = (guesses[i] + 1) % self._vocab_size
        return np.array(guesses, np.int32)
