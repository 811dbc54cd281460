"""Plug-ins of a package outside of Baton: its metadata beside it declares them."""

import numpy as np

from baton.engine.scheduler.scheduling.policy import DecodeOrder, Policy

LAST_COME = Policy(DecodeOrder.FIRST, lambda _request, arrival, _step: -float(arrival))


class Repeater:
    """Drafter that expects the last token again and again."""

    def __init__(self, *, model_path, vocab_size):
        self.vocab_size = vocab_size

    def propose(self, requests):
        last = [request.token_ids[-1] for request in requests]
        assert max(last) < self.vocab_size
        return [np.full(r.max_drafts, t, np.int32) for r, t in zip(requests, last, strict=True)]
