"""Images whose tokens see each other in both directions, on our kernels."""

import pytest

from baton.sampling import SamplingParams

pytest.importorskip("PIL")

from tests.support.engine.images import (
    IMAGE_TOKEN,
    greedy,
    image,
    save_vision_language,
    words,
)

GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
GIVEN = [
    (f"{words(2, 1)} {IMAGE_TOKEN} {words(2, 2)} {IMAGE_TOKEN} w9", (image(1), image(2))),
    (words(5, 5), ()),
]


@pytest.mark.nightly
def test_triton_engine_answers_images_as_transformers(tmp_path, load):
    save_vision_language("gemma3", tmp_path)
    path = str(tmp_path)
    engine = load(path, max_num_batched_tokens=16)
    prompts = [engine.prompt_with_images(text, images) for text, images in GIVEN]
    said = [result.token_ids for result in engine.generate(prompts, GREEDY)]
    assert said == [greedy(path, text, images, 3) for text, images in GIVEN]
