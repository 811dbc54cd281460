"""Whole-engine throughput against transformers, same weights, same prompts, same tokens.

16 prompts of 32 to 128 tokens, 32 new tokens each, greedy, float32. Both of transformers' ways are
measured: one padded batch through `generate`, and its continuous batching `generate_batch`, whose
manager stays up between passes. The engine runs as it comes, and with steps of 2,048 tokens, which
takes all prompts at once as `generate` does.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from baton.engine import LLM, EngineConfig, SamplingParams
from bench.report import Row, interleaved
from bench.workload import MAX_TOKENS, prompts, save_model

Tokens = list[list[int]]

AIM = 3.0


def run(repeats: int) -> list[Row]:
    """Tokens per second of the engine, and of both references in the same run."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        engines = {
            "engine, defaults": _baton(folder, None),
            "engine, steps of 2,048 tokens": _baton(folder, 2048),
        }
        static, continuous = "transformers generate, static batch", "transformers generate_batch"
        contenders = {**engines, static: _static(folder), continuous: _continuous(folder)}
        expected = contenders[static]()
        for name, generate in contenders.items():
            assert generate() == expected, f"{name} gave other tokens"
        rates = interleaved({n: _timed(g) for n, g in contenders.items()}, repeats)
    return [
        Row(case, rates[case], "tokens/s", other, rates[other], rates[case] / rates[other], aim)
        for case in engines
        for other, aim in ((static, AIM), (continuous, None))
    ]


def _timed(generate: Callable[[], Tokens]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        num_tokens = sum(map(len, generate()))
        return num_tokens / (time.perf_counter() - start)

    return measure


def _baton(folder: str, tokens_per_step: int | None) -> Callable[[], Tokens]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        num_blocks=1024,
        prefix_caching=False,
        max_num_batched_tokens=tokens_per_step,
    )
    engine = LLM.from_pretrained(folder, config)
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
        outputs = model.generate_batch(
            inputs=batch, generation_config=config, persistent_manager=True
        )
        # Ids count on from pass to pass, in the order of the prompts.
        ordered = sorted(outputs.values(), key=lambda o: int(o.request_id.split("_")[-1]))
        return [list(output.generated_tokens) for output in ordered]

    return generate


def _load(folder: str, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )
    return model.eval()
