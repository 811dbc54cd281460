"""Ranking of a request's sequences for `best_of`: selection and order of the results."""

from baton.engine.outputs import SequenceUpdate
from baton.sampling import SamplingParams


def ranked(updates: list[SequenceUpdate], params: SamplingParams) -> list[list[SequenceUpdate]]:
    """Returns the updates of each sequence that is part of the result, the best first.

    With `best_of`, selects the `n` sequences with the highest mean log-probability of a token;
    beams come ranked; samples are returned as they are, in the order of their index.
    """
    of_each: dict[int, list[SequenceUpdate]] = {}
    for update in updates:
        of_each.setdefault(update.index, []).append(update)
    sequences = [of_each[index] for index in sorted(of_each)]
    if params.beam_width == 0 and params.num_sequences > params.n:
        sequences.sort(key=mean_logprob, reverse=True)
    return sequences[: params.n]


def mean_logprob(updates: list[SequenceUpdate]) -> float:
    """Returns the mean log-probability of a finished sequence's tokens, in nats."""
    logprobs = [u.logprobs.logprob for u in updates if u.logprobs is not None]
    assert logprobs, "a sequence to be ranked without log-probabilities"
    return sum(logprobs) / len(logprobs)
