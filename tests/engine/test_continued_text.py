"""Texts of offline batches with the files of a published checkpoint: each continues its prompt's,
and no token that ended a sequence is shown."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.llm import LLM
from baton.engine.request import FinishReason
from baton.sampling import SamplingParams
from tests.support.cluster.published import ANSWER, TEXT, said_by_transformers, save_published
from tests.support.engine.engines import load

GREEDY = SamplingParams(max_tokens=20)
LONG_TEXT = "hello " * 20 + TEXT


@pytest.fixture(scope="module", params=["metaspace", "strip"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine of the published checkpoint."""
    folder: Path = tmp_path_factory.mktemp("published")
    save_published(folder, request.param)
    with load(str(folder)) as llm:
        yield llm


def said(llm: LLM, text: str, **sampling: object) -> tuple[str | None, FinishReason]:
    (result,) = llm.generate([text], SamplingParams(**{"max_tokens": 20, **sampling}))  # type: ignore[arg-type]
    return result.text, result.finish_reason


@pytest.mark.parametrize("text", [TEXT, LONG_TEXT], ids=["short", "long"])
def test_llm_continues_text_of_prompt_as_transformers(llm: LLM, text: str) -> None:
    """Its generation configuration names no end; its tokenizer would cut the prompt or pad it."""
    assert said_by_transformers(llm.core.path, text) == ANSWER
    assert said(llm, text) == (ANSWER, FinishReason.END_OF_SEQUENCE)
    (result,) = llm.generate([text], GREEDY)
    assert len(result.prompt_token_ids) == len(text.split())


@pytest.mark.parametrize(
    ("stop", "text"), [(" world", ""), (" is", " world,"), ("never written", ANSWER)]
)
def test_llm_finds_stop_string_with_leading_space(llm: LLM, stop: str, text: str) -> None:
    reason = FinishReason.END_OF_SEQUENCE if text == ANSWER else FinishReason.STOP_STRING
    assert said(llm, TEXT, stop=(stop,)) == (text, reason)


@pytest.mark.parametrize("stop", [(), ("never written",)])
def test_llm_shows_no_stop_token_and_an_ignored_end(llm: LLM, stop: tuple[str, ...]) -> None:
    last = llm.tokenizer.convert_tokens_to_ids("▁it")
    ended = said(llm, TEXT, stop=stop, stop_token_ids=(last,))
    assert ended == (" world, is", FinishReason.STOP_TOKEN)
    ignored = said(llm, TEXT, stop=stop, ignore_eos=True, max_tokens=4)
    assert ignored == (f"{ANSWER}<end>", FinishReason.LENGTH)
