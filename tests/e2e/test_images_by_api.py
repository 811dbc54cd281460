"""Images from clients by both APIs to the workers of a cluster: tokens equal transformers'."""

import openai
import pytest
from transformers import AutoProcessor

from baton import Client
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Image, Message, SamplingParams
from tests.support.engine.images import IMAGE_TOKEN, PLACEHOLDER_ID, greedy, image, words
from tests.support.router.images import data_url, encoded

pytestmark = pytest.mark.e2e
NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def cluster(pictured: LocalCluster) -> LocalCluster:
    return pictured


def test_text_with_images_equals_transformers(cluster):
    text = f"{words(9, 1)} {IMAGE_TOKEN} {words(3, 2)} {IMAGE_TOKEN}"
    images = [Image(encoded(image(seed))) for seed in (1, 2)]
    with Client(cluster.address) as client:
        completion = client.generate(text, PARAMS, images=images).token_ids()
    expected = greedy(cluster.model, text, [image(1), image(2)], NUM_TOKENS)
    assert tuple(completion) == expected


def test_chat_over_both_apis_equals_transformers(cluster):
    processor = AutoProcessor.from_pretrained(cluster.model)
    question = words(5, 3)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    expected = greedy(cluster.model, text, [image(4)], NUM_TOKENS)
    with Client(cluster.address) as client:
        message = Message("user", [Image(encoded(image(4))), question])
        completion = client.generate([message], PARAMS).token_ids()
    assert tuple(completion) == expected
    front = openai.OpenAI(base_url=f"{cluster.http_address}/v1", api_key="any")
    url = {"url": data_url(encoded(image(4)))}
    answer = front.chat.completions.create(
        model=front.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": url},
                    {"type": "text", "text": question},
                ],
            }
        ],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content.split() == [
        f"w{i}" for i in expected if i < PLACEHOLDER_ID
    ]
