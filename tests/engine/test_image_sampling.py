"""Log-probabilities, several sequences and beams after images: those of transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.llm import Completion
from baton.engine.scheduler.plan import TokenLogprobs
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, load
from tests.support.engine.images import IMAGE_TOKEN, image, loaded, save_vision_language, words

NUM_TOKENS, NUM_TOP = 8, 5
TEXT = f"{words(5, 1)} {IMAGE_TOKEN} {words(3, 2)} {IMAGE_TOKEN} {words(2, 3)}"
IMAGES = (image(1), image(2))
SCORED = SamplingParams(
    max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True, top_logprobs=NUM_TOP, prompt_logprobs=0
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("llava")
    save_vision_language("llava_clip", folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompt(path: str) -> Any:
    """The prompt as transformers' processor returns it."""
    _, processor = loaded(path)
    return processor(text=TEXT, images=list(IMAGES), return_tensors="pt")


def following(path: str, prompt: Any, output: tuple[int, ...]) -> torch.Tensor:
    """Returns what follows each token of the prompt and an output, in nats:
    `[num_tokens, vocab_size]`."""
    model, _ = loaded(path)
    token_ids = torch.cat([prompt["input_ids"], torch.tensor([output], dtype=torch.int64)], 1)
    with torch.inference_mode():
        logits = model(input_ids=token_ids, pixel_values=prompt["pixel_values"]).logits[0]
    return logits.log_softmax(-1)


def assert_scores(got: tuple[TokenLogprobs, ...], rows: torch.Tensor, said: list[int]) -> None:
    assert len(got) == len(said)
    expected = rows[range(len(said)), said].tolist()
    assert [each.logprob for each in got] == pytest.approx(expected, abs=2e-4)


def assert_completion(path: str, prompt: Any, completion: Completion) -> None:
    said = completion.token_ids
    rows = following(path, prompt, said)[prompt["input_ids"].shape[1] - 1 : -1]
    assert_scores(completion.logprobs, rows, list(said))
    for mine, row in zip(completion.logprobs, rows, strict=True):
        assert mine.top_logprobs == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=2e-4)


@pytest.mark.parametrize("num_batched", [13, 512])
def test_logprobs_through_images_equal_transformers(path, prompt, num_batched):
    engine = load(path, max_num_batched_tokens=num_batched, max_num_seqs=6)
    given = engine.prompt_with_images(TEXT, IMAGES)
    for _ in range(2):  # log-probabilities of a prompt are computed again, whatever is cached
        (result,) = engine.generate([given], SCORED)
        assert_completion(path, prompt, result.completions[0])
        token_ids = prompt["input_ids"][0].tolist()
        assert_scores(result.prompt_logprobs, following(path, prompt, ()), token_ids[1:])
    assert_idle(engine)


@pytest.mark.parametrize("params", [{"n": 3}, {"n": 2, "best_of": 4}])
def test_sequences_that_fork_after_images_score_right(path, prompt, params):
    engine = load(path, max_num_batched_tokens=24, max_num_seqs=6, block_size=4)
    sampled = replace(SCORED, prompt_logprobs=None, temperature=1.5, seed=3, **params)
    (result,) = engine.generate([engine.prompt_with_images(TEXT, IMAGES)], sampled)
    assert len({c.token_ids for c in result.completions}) == params["n"]
    for completion in result.completions:
        assert_completion(path, prompt, completion)
    assert_idle(engine)


@pytest.mark.parametrize("num_batched", [13, 512])
def test_beams_after_images_equal_transformers(path, prompt, num_batched):
    engine = load(path, max_num_batched_tokens=num_batched, max_num_seqs=6, block_size=4)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, beam_width=3, n=3)
    (result,) = engine.generate([engine.prompt_with_images(TEXT, IMAGES)], params)
    model, _ = loaded(path)
    out = model.generate(
        **prompt,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        num_beams=3,
        num_return_sequences=3,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
    )
    said = [tuple(row) for row in out.sequences[:, prompt["input_ids"].shape[1] :].tolist()]
    assert [c.token_ids for c in result.completions] == said
    scores = out.sequences_scores.tolist()
    assert [c.score for c in result.completions] == pytest.approx(scores, abs=1e-4)
    assert_idle(engine)
