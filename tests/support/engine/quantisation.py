"""Oracle of fp8 (e4m3) caches: transformers, with K and V in attention as such a cache has them.

Knows nothing of ours: the numbers of e4m3 are listed here from its definition.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from baton.engine.llm import LLM
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE
from tests.support.engine.engines import tokens
from tests.support.engine.prompts import random_prompt

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True)
# A number that rounds the other way moves logits by about a hundredth.
MARGIN = 0.05
_names = count()


def _e4m3() -> torch.Tensor:
    """All numbers of e4m3 that are not negative, by their code: 4 bits of exponent, bias 7, and 3
    of mantissa; subnormal at exponent 0; no infinity, and the last is none."""
    codes = torch.arange(127)
    exponents, mantissas = (codes // 8).double(), (codes % 8).double()
    normal = 2.0 ** (exponents - 7) * (1 + mantissas / 8)
    return torch.where(exponents == 0, 2.0**-6 * mantissas / 8, normal)


NUMBERS = _e4m3()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of e4m3, of two that are as near the one with an even code, in the type of
    `x`. NaN stays NaN."""
    size = x.abs().double().clamp(max=float(NUMBERS[-1])).contiguous()
    above = torch.searchsorted(NUMBERS, size).clamp(max=len(NUMBERS) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = NUMBERS[above] - size, size - NUMBERS[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    nearest = torch.where(is_above, NUMBERS[above], NUMBERS[below]) * x.sign()
    return nearest.to(x.dtype).where(~x.isnan(), x)


Scales = dict[tuple[int, str], torch.Tensor]


@dataclass(frozen=True)
class Generated:
    """`margin`: by how much the closest of the choices was made, in logits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margin: float


def add_scales(folder: str, target: Path, scales: Scales, name: str) -> str:
    """A copy of a checkpoint that has scales too, by layer and "k" or "v"; `name` is a pattern."""
    target.mkdir()
    for file in Path(folder).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    weights |= {name.format(layer=layer, kind=k): scale for (layer, k), scale in scales.items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return str(target)


def generate(path: str, prompt: Sequence[int], num_tokens: int, scales: Scales) -> Generated:
    """Generates greedily in float32; computes the whole sequence again for each token."""

    def attend(
        module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        heads = []
        for kind, x in (("k", key), ("v", value)):  # [1, num_kv_heads, num_tokens, head_dim]
            scale = scales.get((module.layer_idx, kind), torch.ones(1)).view(-1, 1, 1)
            heads.append(rounded(x / scale) * scale)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, *heads, *args, **kwargs)

    name = f"quantising_{next(_names)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=name
    ).eval()
    tokens, logprobs, margin = list(prompt), [], torch.inf
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            margin = min(margin, first - second)
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
    return Generated(tuple(tokens[len(prompt) :]), tuple(logprobs), margin)


def decided(
    path: str, lengths: Sequence[int], num_tokens: int, scales: Scales, vocab_size: int = VOCAB_SIZE
) -> dict[tuple[int, ...], Generated]:
    """A prompt of each length with what follows it, in which no choice is close."""
    found: dict[tuple[int, ...], Generated] = {}
    for length in lengths:
        for seed in range(20):
            prompt = random_prompt(length, seed, vocab_size)
            generated = generate(path, prompt, num_tokens, scales)
            if generated.margin > MARGIN:
                found[prompt] = generated
                break
    assert len(found) == len(lengths), "of some length no prompt is decided"
    return found


def check(engine: LLM, other: LLM, expected: dict[tuple[int, ...], Generated]) -> None:
    """The engine's tokens are as expected, and its log-probabilities much nearer to what is
    expected than those of the other."""
    results = engine.generate([*expected], GREEDY)
    assert tokens(results) == [e.token_ids for e in expected.values()]
    apart = [
        sum(
            abs(mine - theirs)
            for result, one in zip(some, expected.values(), strict=True)
            for mine, theirs in zip(result.logprobs, one.logprobs, strict=True)
        )
        for some in (results, other.generate([*expected], GREEDY))
    ]
    assert apart[0] < 0.1 * apart[1]
