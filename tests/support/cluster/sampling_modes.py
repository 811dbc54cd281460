"""Ways of choosing tokens, all of which have to survive what happens to a cluster."""

from dataclasses import replace

import pytest

from baton.client.client import Completion
from baton.client.generation import AsyncGeneration
from baton.client.types import TokenLogprobs
from baton.sampling import Grammar, GrammarKind, SamplingParams

CODE = "def fibonacci(n):\n    "
GREEDY = SamplingParams(max_tokens=300, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=300, temperature=0.9, seed=7, ignore_eos=True)
WORDS = Grammar(GrammarKind.REGEX, "([a-z]{3,9} ){90}")
# Seeds by which no draw is nearer than 1.5e-6 to the border of two tokens: which of them it is may
# depend on the rounding of KV that another worker computes in other chunks, by up to 1e-6.
WAYS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(
        SEEDED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=250
    ),
    "bans": replace(GREEDY, bad_words=(" self", " return"), logit_bias=((40, 2.0), (41, -2.0))),
    "logprobs": replace(SEEDED, logprobs=True, top_logprobs=3, prompt_logprobs=2),
    "grammar": replace(SEEDED, grammar=WORDS, max_tokens=290, seed=9, ignore_eos=False),
    "several": replace(SEEDED, n=3, seed=77),
    "best": replace(SEEDED, n=2, best_of=3, seed=104),
    "beams": SamplingParams(max_tokens=200, n=2, beam_width=2),
}

# Those that an end-to-end test of a disturbance keeps; all of them meet it in one process, in
# tests/worker/test_sampling_modes.py.
THREE_WAYS = {name: WAYS[name] for name in ("seeded", "several", "grammar")}

Answer = tuple[list[Completion], list[TokenLogprobs]]


def with_late_stop_string(text: str) -> dict[str, SamplingParams]:
    """All ways, and one that ends with a string that comes late in `text`, the seeded one's, and in
    more than one token."""
    stop = next(text[i : i + 9] for i in range(len(text) // 2, len(text)) if _is_new(text, i))
    return {**WAYS, "stop string": replace(SEEDED, stop=(stop,))}


async def answer_of(generation: AsyncGeneration) -> Answer:
    return await generation.completions(), generation.prompt_logprobs


def check_same(name: str, answer: Answer, undisturbed: Answer) -> None:
    """Two runs told the same. Logits computed in other batches differ in their last bits."""
    for one, other in zip(answer[0], undisturbed[0], strict=True):
        assert one.token_ids == other.token_ids, name
        assert one.text == other.text, name
        assert one.finished.reason == other.finished.reason, name
        assert one.finished.stop_string == other.finished.stop_string, name
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3), name
        assert list(map(tuple, one.top_logprobs)) == list(map(tuple, other.top_logprobs)), name
    scores, expected = ([s.logprob for s in a[1]] for a in (answer, undisturbed))
    assert scores == pytest.approx(expected, abs=1e-3), name


def _is_new(text: str, at: int) -> bool:
    part = text[at : at + 9]
    return len(part) == 9 and text.find(part) == at and part.isprintable()
