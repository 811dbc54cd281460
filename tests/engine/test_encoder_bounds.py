"""Encoder budget and cache of a real engine, under random requests for a few images."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import load as load_model
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.vision.vision_encoder import VisionEncoder
from baton.engine.llm import LLM
from baton.engine.request import MultimodalPrompt
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, request
from tests.support.engine.images import (
    IMAGE_TOKEN,
    TOKENS_PER_IMAGE,
    image,
    save_vision_language,
    words,
)

BLOCK_SIZE = 4
BLOCKS_PER_IMAGE = -(-TOKENS_PER_IMAGE // BLOCK_SIZE)
NUM_IMAGES = 5
NUM_TOKENS = 4
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
MAX_STEPS = 500


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request for these images that arrives before a step, and may be aborted before another."""

    images: tuple[int, ...]
    step: int
    aborted: int | None

    @property
    def text(self) -> str:
        return " ".join(f"{words(3, number)} {IMAGE_TOKEN}" for number in self.images) + " w7"


AT_ONCE = [Arrival((0, 1, 2), 0, None), Arrival((3, 4), 0, 1)]
arrivals = st.builds(
    Arrival,
    images=st.lists(st.integers(0, NUM_IMAGES - 1), max_size=4).map(tuple),
    step=st.integers(0, 12),
    aborted=st.none() | st.integers(0, 20),
)


@dataclass
class RecordingEncoder:
    """Vision encoder that records the tokens that it computes, and the image in each block."""

    encoder: VisionEncoder
    blocks: dict[int, bytes] = field(default_factory=dict)
    num_encoded: int = 0

    def encode(self, outputs: Sequence[EncoderOutput]) -> None:
        for output in outputs:
            encoder_input = output.encoder_input
            assert encoder_input.content_hash not in self.kept, "an image is encoded that is kept"
            self.blocks.update(dict.fromkeys(output.block_ids, encoder_input.content_hash))
            self.num_encoded += encoder_input.length
        self.encoder.encode(outputs)

    @property
    def kept(self) -> set[bytes]:
        """Content hashes of the images of which all blocks are there."""
        counts = Counter(self.blocks.values())
        return {content_hash for content_hash in counts if counts[content_hash] == BLOCKS_PER_IMAGE}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llava_clip")
    save_vision_language("llava_clip", folder)
    return str(folder)


def recorded(path: str, **changes: Any) -> tuple[LLM, RecordingEncoder]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_blocks=96,
        free_block_margin=0.0,
        block_size=BLOCK_SIZE,
        **changes,
    )
    loaded = load_model(path, config, lambda _phase, _fraction: None)
    assert isinstance(loaded.encoder, VisionEncoder)
    encoder = RecordingEncoder(loaded.encoder)
    return LLM(EngineCore(config, replace(loaded, encoder=encoder))), encoder  # type: ignore[arg-type]


@cache
def amply(path: str) -> LLM:
    """An engine whose budget and cache take any request at once."""
    return recorded(path, encoder_budget=512, encoder_cache_tokens=512, prefix_caching=False)[0]


@cache
def prompt_of(path: str, images: tuple[int, ...]) -> MultimodalPrompt:
    text = Arrival(images, 0, None).text
    return amply(path).prompt_with_images(text, [image(number) for number in images])


@cache
def expected(path: str, images: tuple[int, ...]) -> tuple[int, ...]:
    return amply(path).generate([prompt_of(path, images)], GREEDY)[0].token_ids


@settings(max_examples=15)
@example(arriving=AT_ONCE, budget=1, spare=1, num_batched=512, prefix_caching=False)
@example(arriving=AT_ONCE, budget=2, spare=0, num_batched=512, prefix_caching=True)
@given(
    arriving=st.lists(arrivals, min_size=1, max_size=8),
    budget=st.integers(1, 3),
    spare=st.integers(0, 2),
    num_batched=st.sampled_from([7, 16, 40, 512]),
    prefix_caching=st.booleans(),
)
def test_encoder_stays_within_budget_and_cache(
    checkpoint, arriving, budget, spare, num_batched, prefix_caching
):
    cached = budget + spare
    engine, encoder = recorded(
        checkpoint,
        encoder_budget=budget * TOKENS_PER_IMAGE,
        encoder_cache_tokens=cached * TOKENS_PER_IMAGE,
        max_num_batched_tokens=num_batched,
        max_num_seqs=4,
        prefix_caching=prefix_caching,
    )
    updates: dict[str, list[Any]] = {str(number): [] for number in range(len(arriving))}
    aborted: set[str] = set()
    for step in range(MAX_STEPS):
        for name, arrival in zip(updates, arriving, strict=True):
            if arrival.step == step:
                prompt = prompt_of(checkpoint, arrival.images)
                ids, inputs = prompt.token_ids, prompt.encoder_inputs
                engine.core.add(request(name, ids, GREEDY, encoder_inputs=inputs))
            if arrival.aborted == step > arrival.step:
                engine.core.scheduler.abort(name)
                aborted.add(name)
        encoder.num_encoded = 0
        for update in engine.core.step().updates:
            updates[update.request_id].append(update)
        assert encoder.num_encoded <= budget * TOKENS_PER_IMAGE
        assert all(1 <= block_id <= cached * BLOCKS_PER_IMAGE for block_id in encoder.blocks)
        engine.core.scheduler.check_integrity()
        if step > 20 and not engine.core.has_work:
            break
    assert_idle(engine)
    for name, arrival in zip(updates, arriving, strict=True):
        said = [u.token_id for u in updates[name] if u.token_id is not None]
        whole = list(expected(checkpoint, arrival.images))
        assert said == whole[: len(said)] if name in aborted else said == whole
    # Nothing holds an output any more: other images take the place of all.
    before = encoder.kept
    others = [engine.prompt_with_images(IMAGE_TOKEN, [image(9 + i)]) for i in range(cached)]
    engine.generate(others, GREEDY)
    assert not before & encoder.kept
