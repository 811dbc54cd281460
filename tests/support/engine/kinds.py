"""Requests of every kind, and all of an answer that does not depend on how the work was cut."""

from dataclasses import replace
from typing import Any

from baton.engine.outputs import SequenceUpdate
from baton.sampling import EarlyStopping, SamplingParams

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=1.3, seed=9)
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "greedy, short": replace(GREEDY, max_tokens=1),
    "sampled": RANDOM,
    "truncated": replace(RANDOM, top_k=30, top_p=0.9, min_p=0.01),
    "scored": replace(GREEDY, logprobs=True, top_logprobs=4, prompt_logprobs=2),
    "sampled and scored": replace(RANDOM, logprobs=True, prompt_logprobs=0),
    "several": replace(RANDOM, n=3),
    "several, penalised": replace(RANDOM, n=2, repetition_penalty=1.3, frequency_penalty=0.4),
    "best": replace(RANDOM, n=2, best_of=4),
    "beams": replace(GREEDY, beam_width=3, n=3),
    "scored beams": replace(GREEDY, beam_width=2, n=1, prompt_logprobs=1, logprobs=True),
    "stopping beams": replace(
        GREEDY, beam_width=4, n=2, stop_token_ids=tuple(range(100, 150)),
        early_stopping=EarlyStopping.FIRST, length_penalty=0.5,
    ),
    "stopping": replace(GREEDY, stop_token_ids=tuple(range(100, 160))),
    "not stopping yet": replace(GREEDY, stop_token_ids=tuple(range(100, 160)), min_tokens=9),
    "biased": replace(GREEDY, logit_bias=((40, 5.0), (41, 5.5))),
    "banned": replace(RANDOM, bad_token_ids=(*((t,) for t in range(200)), (300, 301))),
    "penalised": replace(GREEDY, presence_penalty=1.0, repetition_penalty=0.8),
    "never guessing": replace(GREEDY, speculate=False),
}  # fmt: skip

Transcript = tuple[Any, ...]


def transcript(updates: list[SequenceUpdate]) -> Transcript:
    """All that does not depend on how the work was cut."""
    sequences: dict[int, list[SequenceUpdate]] = {}
    for update in updates:
        if update.token_id is not None:
            sequences.setdefault(update.index, []).append(update)
    return (
        {
            index: (
                tuple(u.token_id for u in of_one),
                tuple(u.position for u in of_one),
                [u.finish_reason for u in of_one],
            )
            for index, of_one in sequences.items()
        },
        [scores.top_token_ids for u in updates for scores in u.prompt_logprobs],
        {i: [u.logprobs and u.logprobs.top_token_ids for u in s] for i, s in sequences.items()},
    )
