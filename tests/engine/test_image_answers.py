"""Shipped model `shapes`: right answers about drawings that it was not trained on."""

from collections.abc import Sequence

import pytest
from PIL import Image

from baton.engine.llm import LLM, GenerationResult
from baton.models import locate
from baton.models.shapes.drawings import comparisons, held_out, messages, questions
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, load, tokens
from tests.support.engine.images import greedy

SHAPES = locate("shapes")
MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
NUM_PAIRS = 20
SURE = {"count", "colour", "presence"}
MOST_WRONG = 0.02  # of these; the model's README has its accuracy
Asked = tuple[str, str, tuple[Image.Image, ...], str]


@pytest.fixture(scope="module")
def engine() -> LLM:
    """An engine that needs several steps to encode the images of all prompts."""
    return load(SHAPES, num_blocks=512, encoder_budget=180)


@pytest.fixture(scope="module")
def asked(engine: LLM) -> list[Asked]:
    """All questions about each drawing, and about each pair: kind, prompt, images, answer."""
    found: list[Asked] = []
    for number in range(NUM_PAIRS):
        pair = held_out(number)
        of_each = [(pair[:1], q) for q in questions(pair[0])]
        of_each += [(pair, q) for q in comparisons(*pair)]
        for drawings, question in of_each:
            chat = messages(question.text, len(drawings))
            text = engine.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
            found.append((question.kind, text, tuple(d.image() for d in drawings), question.answer))
    return found


def generate(engine: LLM, asked: Sequence[Asked]) -> list[GenerationResult]:
    prompts = [engine.prompt_with_images(text, images) for _, text, images, _ in asked]
    return engine.generate(prompts, GREEDY)


def test_shapes_answers_questions_about_drawings_right(engine, asked):
    sure = [each for each in asked if each[0] in SURE]
    said = [result.text for result in generate(engine, sure)]
    wrong = [
        f"{text} {answer}, not {given}"
        for (_, text, _, answer), given in zip(sure, said, strict=True)
        if given != answer
    ]
    assert len(sure) > 150
    assert len(wrong) <= MOST_WRONG * len(sure), wrong
    assert_idle(engine)


def test_shapes_answers_as_transformers_token_for_token(engine, asked):
    some = asked[::11]
    expected = [greedy(SHAPES, text, images, MAX_TOKENS) for _, text, images, _ in some]
    assert tokens(generate(engine, some)) == expected
