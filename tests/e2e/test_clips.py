"""Clips from clients to the workers of a cluster: answers equal those about their frames as images,
and transformers'. Programs of the guide about both run as they stand but for addresses."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoProcessor

from baton import Client
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Clip, Image, Message, SamplingParams
from baton.models import locate
from baton.models.shapes.drawings import comparisons, held_out
from tests.support.engine.images import greedy, image, words
from tests.support.repository import ROOT
from tests.support.router.images import animated, data_url, encoded, frames_url

pytestmark = pytest.mark.e2e
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def tokens_of(client: Client, content: Sequence[str | Image | Clip]) -> list[int]:
    return list(client.generate([Message("user", content)], PARAMS).token_ids())


def test_clip_equals_transformers(pictured):
    checkpoint, question = pictured.model, words(5, 3)
    frames = [image(4), image(4).rotate(180)]
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question}]
    text = AutoProcessor.from_pretrained(checkpoint).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    with Client(pictured.address) as client:
        found = tokens_of(client, [Clip(animated(frames, "PNG")), question])
    assert tuple(found) == greedy(checkpoint, text, frames, 12)


@pytest.fixture(scope="module")
def shapes() -> Iterator[LocalCluster]:
    flags = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
    with LocalCluster(locate("shapes"), http_port=0, worker_flags=flags) as started:
        yield started


def turn(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_model_answers_about_clip_as_about_its_frames(shapes):
    for number in range(3):
        drawings = held_out(number)
        frames = [drawing.image() for drawing in drawings]
        files = [encoded(frame) for frame in frames]
        with Client(shapes.address) as client:
            for question in comparisons(*drawings):
                expected = tokens_of(client, [*map(Image, files), question.text])
                assert tokens_of(client, [Clip(animated(frames)), question.text]) == expected


def test_openais_client_sends_clip_as_file_or_frames(shapes):
    drawings = held_out(1)
    frames = [drawing.image() for drawing in drawings]
    files = [encoded(frame) for frame in frames]
    front = openai.OpenAI(base_url=f"{shapes.http_address}/v1", api_key="any")
    question = {"type": "text", "text": comparisons(*drawings)[0].text}
    images = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    clips = [
        {"type": "video_url", "video_url": {"url": url}}
        for url in (data_url(animated(frames), "image/gif"), frames_url(files))
    ]
    answers, counts = [], []
    for messages in (turn(*images, question), *(turn(clip, question) for clip in clips)):
        answer = front.chat.completions.create(
            model=front.models.list().data[0].id, messages=messages, temperature=0
        )
        answers.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
        body = {"messages": messages}
        counts.append(httpx.post(f"{shapes.http_address}/tokenize", json=body).json()["count"])
    assert answers[0][0]
    assert answers[1:] == answers[:1] * 2
    assert counts == [answers[0][1]] * 3


BY_OPENAI, BY_CLIENT, OF_CLIP, *_ = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/guides/images.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        pytest.param(BY_OPENAI, "one", id="openai"),
        pytest.param(BY_CLIENT, "one", id="client"),
        # The model has not learnt to compare: it names a picture, which may be the wrong one.
        pytest.param(
            f"{BY_OPENAI}{OF_CLIP}print(answer.choices[0].message.content)", "the ", id="clip"
        ),
    ],
)
def test_program_of_the_images_guide_runs(shapes, tmp_path: Path, program, answer):
    drawing, other = held_out(3)
    (tmp_path / "circles.png").write_bytes(encoded(drawing.image()))
    (tmp_path / "circles.gif").write_bytes(animated([drawing.image(), other.image()]))
    for written, actual in (
        ("127.0.0.1:50051", shapes.address),
        ("http://127.0.0.1:8000", shapes.http_address),
    ):
        program = program.replace(written, actual)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout
