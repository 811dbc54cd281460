"""Stop strings and bad words of offline batches."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.engine.config import EngineConfig
from baton.engine.llm import LLM, GenerationResult
from baton.engine.request import FinishReason
from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle

PROMPTS = ["def main(", "class Reader:\n    def __init__(self", "import os\n"]
LONG = SamplingParams(max_tokens=48, ignore_eos=True, speculate=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_pretrained("tiny", EngineConfig(device="cpu", num_blocks=128)) as llm:
        yield llm


def texts(result: GenerationResult) -> list[str]:
    return [completion.text or "" for completion in result.completions]


@pytest.mark.parametrize("stop", ["\n", ":", "e", "self.", "\n    "])
@pytest.mark.parametrize(
    "params",
    [LONG, replace(LONG, n=3, temperature=1.2, seed=5), replace(LONG, speculate=True)],
    ids=["greedy", "samples", "drafts"],
)
def test_text_ends_before_its_first_stop_string(llm, params, stop):
    whole = llm.generate(PROMPTS, params)
    ended = llm.generate(PROMPTS, replace(params, stop=("never written", stop)))
    assert_idle(llm)
    for before, after in zip(whole, ended, strict=True):
        for text, completion in zip(texts(before), after.completions, strict=True):
            assert completion.text == text.partition(stop)[0]
            has_stopped = completion.finish_reason is FinishReason.STOP_STRING
            assert has_stopped == (stop in text)
            assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])


def test_best_of_ends_texts_before_stop_string(llm):
    params = replace(LONG, n=2, best_of=4, temperature=1.2, seed=5)
    (whole,), (ended,) = (
        llm.generate(PROMPTS[:1], one) for one in (params, replace(params, stop=("\n",)))
    )
    assert {text.partition("\n")[0] for text in texts(whole)} == set(texts(ended))


def test_bad_words_are_those_of_their_tokens(llm):
    word = texts(llm.generate(PROMPTS[:1], LONG)[0])[0].split()[0]
    (result,) = llm.generate(PROMPTS[:1], replace(LONG, bad_words=(word,)))
    banned = tuple(
        dict.fromkeys(
            tuple(llm.tokenizer.encode(form, add_special_tokens=False))
            for form in (word, f" {word}")
        )
    )
    assert result == llm.generate(PROMPTS[:1], replace(LONG, bad_token_ids=banned))[0]
    assert word not in (result.text or "").split()


def test_bad_word_of_too_many_tokens_is_refused(llm):
    with pytest.raises(InvalidArgumentError, match=r"sampling\.bad_words\[1\]: is \d+ tokens"):
        llm.generate(PROMPTS, SamplingParams(bad_words=("x", "xyz " * 60)))
