"""Draws so close to the border of two tokens that logits of other batches, which differ in their
last bits, may turn them."""

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.request import EngineRequest
from tests.support.engine.kinds import Transcript
from tests.support.engine.oracle import Oracle

_NUM_TRIES = 64


def differ_by_toss_ups(
    oracle: Oracle,
    path: str,
    request: EngineRequest,
    one: Transcript,
    other: Transcript,
    noise: float,
) -> bool:
    """Returns whether two answers without beams differ first, in each of their sequences that do,
    where a toss-up decides: with `noise` in the logits either is drawn."""
    tokens, others = ({index: of[0] for index, of in each[0].items()} for each in (one, other))
    assert request.params.beam_width == 0, "beams are not drawn"
    return tokens.keys() == others.keys() and all(
        _is_toss_up(oracle, path, request, index, tokens[index], others[index], noise)
        for index in tokens
    )


def _is_toss_up(
    oracle: Oracle,
    path: str,
    request: EngineRequest,
    index: int,
    tokens: Sequence[int],
    others: Sequence[int],
    noise: float,
) -> bool:
    if tokens == others:
        return True
    place = next(i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b)
    given = torch.tensor([[*request.token_ids, *tokens[:place]]])
    with torch.inference_mode():
        logits = oracle.model(path)(given).logits[0, -1]
    tries = logits + noise * torch.randn(_NUM_TRIES, len(logits))
    return {tokens[place], others[place]} <= _drawn(tries, request, index, given.numpy())


def _drawn(logits: torch.Tensor, request: EngineRequest, index: int, given: np.ndarray) -> set[int]:
    """The tokens that are drawn of these logits after `given` ones."""
    sampler = Sampler(1, logits.shape[-1], torch.device("cpu"), frozenset())
    sampler.assign(0, request.params, request.num_prompt_tokens)
    rows = np.zeros(len(logits), np.int64)
    lengths = rows + given.shape[1]
    choice = sampler.choose(logits, rows, rows + index, lengths, given.astype(np.int32))
    return set(choice.token_ids.tolist())
