"""Whole-engine throughput against transformers, same weights, same prompts, same tokens.

16 prompts of 32 to 128 tokens, 32 new tokens each, greedy, float32. Both of transformers' ways are
measured: one padded batch through `generate`, and its continuous batching `generate_batch`.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from baton.engine import Engine, EngineConfig, SamplingParams
from bench.report import Row, interleaved
from bench.workload import MAX_TOKENS, prompts, save_model

Tokens = list[list[int]]

AIM = 3.0


def run(repeats: int) -> list[Row]:
    """Tokens per second of the engine, and of both references in the same run."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        contenders = {
            "baton": _baton(folder),
            "transformers generate, static batch": _static(folder),
            "transformers generate_batch": _continuous(folder),
        }
        expected = contenders["transformers generate, static batch"]()
        for name, generate in contenders.items():
            assert generate() == expected, f"{name} gave other tokens"
        rates = interleaved({n: _timed(g) for n, g in contenders.items()}, repeats)
    value = rates.pop("baton")
    return [
        Row("engine, 7M Llama fp32, 16 prompts", value, "tokens/s", name, rate, value / rate, AIM)
        for name, rate in rates.items()
    ]


def _timed(generate: Callable[[], Tokens]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        num_tokens = sum(map(len, generate()))
        return num_tokens / (time.perf_counter() - start)

    return measure


def _baton(folder: str) -> Callable[[], Tokens]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_blocks=1024,
        prefix_caching=False,
        max_num_batched_tokens=2048,
    )
    engine = Engine.from_pretrained(folder, config)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return lambda: [list(r.token_ids) for r in engine.generate(prompts(), params)]


def _static(folder: str) -> Callable[[], Tokens]:
    model = _load(folder, "sdpa")
    batch = prompts()
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])

    @torch.inference_mode()
    def generate() -> Tokens:
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            pad_token_id=0,
        )
        tokens: Tokens = out[:, width:].tolist()
        return tokens

    return generate


def _continuous(folder: str) -> Callable[[], Tokens]:
    model = _load(folder, "sdpa")
    config = GenerationConfig(
        do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    batch = prompts()

    def generate() -> Tokens:
        outputs = model.generate_batch(inputs=batch, generation_config=config, progress_bar=False)
        ordered = sorted(outputs.values(), key=lambda o: int(o.request_id.split("_")[-1]))
        return [list(output.generated_tokens) for output in ordered]

    return generate


def _load(folder: str, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()
