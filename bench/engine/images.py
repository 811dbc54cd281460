"""Encoder reuse on a trace whose images repeat, and text throughput of a vision-language model.

Reuse: 240 requests to the shipped model `shapes`, eight at once, each with one drawing. 30% of them
show a drawing again: that of any earlier request, or of a recent one, of the 24 before, as in chats
about pictures. Half of the prompts begin with the drawing; the others' have text before it that no
other has, so that they find nothing in the prefix cache. The figure is the share of these repeats
that the encoder did not compute again. The encoder cache has its default size, or room for all.

Text: the prompts of `engine`, to a LLaVA checkpoint and to its language model alone.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from baton.engine import LLM, EngineConfig, SamplingParams
from baton.engine.core.assembly import load
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.runner import Encoder
from baton.engine.request import MultimodalPrompt
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.models import locate
from baton.models.shapes.drawings import Drawing, random_drawing
from bench.report import Row, interleaved
from bench.workload import MAX_TOKENS, VOCAB_SIZE, prompts, save_model

NUM_REQUESTS = 240
NUM_AT_ONCE = 8
NUM_REPEATS = 72
RECENT = 24
REUSE_AIM = 0.98
TEXT_AIM = 0.97  # as fast, within noise


def run(repeats: int) -> list[Row]:
    """Shares of repeated images that were not encoded again, and the ratio of text throughput."""
    far, near = _trace(NUM_REQUESTS), _trace(RECENT)
    return [
        _reuse("of any request", far, EngineConfig()),
        _reuse("of any, no prefix cache", far, EngineConfig(prefix_caching=False)),
        _reuse("of any, room for all", far, EngineConfig(encoder_cache_tokens=2**14)),
        _reuse("of a recent one", near, EngineConfig()),
        _reuse("of a recent one, no prefix cache", near, EngineConfig(prefix_caching=False)),
        _text(repeats),
    ]


# Reuse


class _CountingEncoder:
    """Encoder that counts the images that it computes."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.num_encoded = 0

    def encode(self, outputs: Sequence[EncoderOutput]) -> None:
        self.num_encoded += len(outputs)
        self._encoder.encode(outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)


def _reuse(case: str, trace: Sequence[Drawing], config: EngineConfig) -> Row:
    config = replace(config, device="cpu", dtype="float32")
    loaded = load(locate("shapes"), config, lambda _phase, _fraction: None)
    assert loaded.encoder is not None
    encoder = _CountingEncoder(loaded.encoder)
    engine = LLM(EngineCore(config, replace(loaded, encoder=encoder)))
    given = [_prompt(engine, number, drawing) for number, drawing in enumerate(trace)]
    for start in range(0, len(given), NUM_AT_ONCE):
        engine.generate(given[start : start + NUM_AT_ONCE], SamplingParams(max_tokens=1))
    possible = len(trace) - len(set(trace))
    saved = len(trace) - encoder.num_encoded
    share = saved / possible
    return Row(
        f"images {case}, encoded once",
        saved,
        "images",
        "all repeats",
        possible,
        share,
        REUSE_AIM,
    )


def _trace(within: int) -> list[Drawing]:
    """Returns the drawings of all requests; those that repeat one take it from the last `within`
    requests."""
    source = random.Random(0)
    others = NUM_REQUESTS - NUM_REPEATS - 1
    flags = source.sample([True] * NUM_REPEATS + [False] * others, NUM_REQUESTS - 1)
    trace = [random_drawing(source)]
    for is_repeat in flags:
        trace.append(source.choice(trace[-within:]) if is_repeat else random_drawing(source))
    return trace


def _prompt(engine: LLM, number: int, drawing: Drawing) -> MultimodalPrompt:
    before = f"{number}: " if number % 2 else ""
    text = f"<|im_start|>user\n{before}<image>How many circles?<|im_end|>\n<|im_start|>assistant\n"
    return engine.prompt_with_images(text, [drawing.image()])


# Text


def _text(repeats: int) -> Row:
    with tempfile.TemporaryDirectory() as name:
        text, vision = Path(name) / "text", Path(name) / "vision"
        save_model(text)
        _add_tower(text, vision)
        contenders = {each: _generator(str(each)) for each in (vision, text)}
        assert len({tuple(map(tuple, generate())) for generate in contenders.values()}) == 1
        rates = interleaved({p.name: _timed(g) for p, g in contenders.items()}, repeats)
    return Row(
        "text to a vision-language model",
        rates["vision"],
        "tokens/s",
        "its language model alone",
        rates["text"],
        rates["vision"] / rates["text"],
        TEXT_AIM,
    )


def _add_tower(text: Path, folder: Path) -> None:
    """Writes a LLaVA whose language model is that of a folder."""
    language = AutoModelForCausalLM.from_pretrained(text, trust_remote_code=False)
    tower = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=language.config,
        image_token_id=VOCAB_SIZE - 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    model.set_decoder(language.get_decoder())
    model.set_output_embeddings(language.get_output_embeddings())
    model.save_pretrained(folder)


def _generator(path: str) -> Callable[[], list[tuple[int, ...]]]:
    config = EngineConfig(device="cpu", dtype="float32", num_blocks=1024, prefix_caching=False)
    engine = LLM.from_pretrained(path, config)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return lambda: [result.token_ids for result in engine.generate(prompts(), params)]


def _timed(generate: Callable[[], list[tuple[int, ...]]]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        num_tokens = sum(map(len, generate()))
        return num_tokens / (time.perf_counter() - start)

    return measure
