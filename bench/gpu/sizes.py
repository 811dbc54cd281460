"""Sizes of the benchmark of a GPU: shapes of models, contexts and batches. Cases are named by them.

The defaults are those of Llama 3 8B on a GPU of 80 GiB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.nn.attention import SDPBackend

LLAMA_8B: Final[dict[str, Any]] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
# One layer of next to nothing: a step of it takes the host's time.
HOST_MODEL: Final[dict[str, Any]] = {
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# 16 GiB of KV together over all layers, so that each finds its 512 MiB uncached, but for the last.
_DECODES: Final = {
    "64 contexts of 2k": (2048,) * 64,
    "256 contexts of 512": (512,) * 256,
    "64 ragged contexts of 128 to 4k": tuple(map(int, np.linspace(128, 4096, 64))),
    "1 context of 128k": (2**17,),
    "1 context of 32k": (2**15,),
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of a model: by default that of Llama 3 8B."""

    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def operations(self, num_tokens: int) -> float:
        """Returns the operations of a prompt's causal attention in all layers."""
        each = 4 * self.num_heads * self.head_dim * num_tokens * (num_tokens + 1) / 2
        return self.num_layers * each


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of the benchmark of engines.

    Attributes:
        name: of the model, in cases.
        model, host_model: configurations as of transformers; a decode step of `host_model` takes
            the host's time.
        host_batches, batches: sequences of a decode step.
        context: tokens of each of them at first.
        num_steps: steps between two looks at the clock.
        max_step_tokens: tokens of a step.
        num_long_prompts, long_prompt_tokens: prompts by which prefill is measured.
        num_prompts, prompt_tokens, output_tokens: requests by whose tokens per second the engine is
            measured.
        num_masked_prompts: number of them against `generate_batch`, each of whose sequences attends
            to the KV of all, and masks others'.
        generate_batch: arguments of that, besides.
        num_speculating, max_drafts: sequences with drafts, and tokens of a draft.
    """

    name: str = "8B"
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA_8B)
    host_model: Mapping[str, Any] = field(default_factory=lambda: HOST_MODEL)
    host_batches: tuple[int, ...] = (1, 16, 64, 256)
    batches: tuple[int, ...] = (1, 64, 256)
    context: int = 512
    num_steps: int = 16
    max_step_tokens: int = 8192
    num_long_prompts: int = 4
    long_prompt_tokens: int = 8192
    num_prompts: int = 256
    prompt_tokens: int = 512
    output_tokens: int = 128
    num_masked_prompts: int = 64
    generate_batch: Mapping[str, Any] = field(default_factory=dict)
    num_speculating: int = 16
    max_drafts: int = 4

    @property
    def attention(self) -> AttentionShape:
        """The attention of `model`."""
        num_heads = self.model["num_attention_heads"]
        return AttentionShape(
            self.model["num_hidden_layers"],
            num_heads,
            self.model["num_key_value_heads"],
            self.model["hidden_size"] // num_heads,
        )

    def prefill_operations(self, weight_bytes: int, num_tokens: int) -> float:
        """Returns the operations of a prompt: two for each weight, which has two bytes, and token;
        the last product computes one row."""
        head_bytes: int = 2 * self.model["vocab_size"] * self.model["hidden_size"]
        return num_tokens * (weight_bytes - head_bytes) + self.attention.operations(num_tokens)


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Sizes of the benchmark of kernels.

    Attributes:
        attention: shape of attention.
        tiled: the same with blocks of whole tiles, which prefill loads by descriptors.
        decodes: contexts of a batch's sequences, by name.
        prefills: tokens of prompts.
        prompt_tokens: tokens of a prompt by TMA, by a library, and of a cache write.
        library_contexts: contexts of decodes by a library.
        copied_bytes, block_bytes: bytes of block copies, and of a block of each.
        sampled_rows, vocab_size: size of the logits that are sampled.
        sdpa: backends of torch's attention, and the ratio to reach, by name.
    """

    attention: AttentionShape = AttentionShape()
    tiled: AttentionShape = AttentionShape(block_size=64)
    decodes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: _DECODES)
    prefills: tuple[int, ...] = (2048, 8192, 32768)
    prompt_tokens: int = 8192
    library_contexts: tuple[int, ...] = (1024,) * 64
    copied_bytes: int = 2**30
    block_bytes: tuple[int, ...] = (2**16, 2**20)
    sampled_rows: int = 256
    vocab_size: int = 128 * 1024
    sdpa: Mapping[str, tuple[SDPBackend, float]] = field(
        default_factory=lambda: {
            "SDPA, cuDNN": (SDPBackend.CUDNN_ATTENTION, 0.8),
            "SDPA, flash": (SDPBackend.FLASH_ATTENTION, 1.0),
        }
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the benchmark, and of the ceilings: `copied_bytes` of a plain copy, and a product of
    `matrix_size` rows and columns."""

    engine: EngineSizes = EngineSizes()
    kernels: KernelSizes = KernelSizes()
    copied_bytes: int = 2**31
    matrix_size: int = 8192


SIZES: Final = Sizes()


def in_k(number: int) -> str:
    """Returns a number as names have it: `8k` of 8192."""
    return str(number) if number % 1024 else f"{number // 1024}k"
