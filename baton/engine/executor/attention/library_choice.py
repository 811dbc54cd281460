"""Attention backend selection: libraries, and why one cannot serve a model on a device.

Knows the limits of each library, and nothing of how it is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import torch

from baton.engine.executor.attention.flash_attention import FlashAttention
from baton.engine.executor.attention.flashinfer_attention import FlashInfer
from baton.engine.executor.attention.interface import LayerAttention
from baton.engine.executor.attention.library_attention import AttentionLibrary
from baton.installation import install_command
from baton_kernels.attention.inputs import HEAD_DIMS
from baton_kernels.gpu import Gpu


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """Model and engine as a library sees them.

    Attributes:
        dtype, kv_dtype: of queries and of the KV cache.
        head_dims: head sizes of its layers.
        deterministic: whether logits must be batch-invariant.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dims: frozenset[int]
    layers: Sequence[LayerAttention]
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Library:
    """Attention library that can be chosen by name.

    Attributes:
        module: import name.
        how_to_install: advice, where it is missing.
        runs_on: whether it has kernels for a GPU of this compute capability.
        capabilities: the same in words.
        head_dims: head sizes of its kernels.
        kernels: makes the kernels for a device and the dtype of queries.
        dtypes: dtypes of queries.
    """

    module: str
    how_to_install: str
    runs_on: Callable[[tuple[int, int]], bool]
    capabilities: str
    head_dims: tuple[int, ...]
    kernels: Callable[[torch.device, torch.dtype], AttentionLibrary]
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def why_not(self, model: LibraryModel, device: torch.device) -> str | None:
        """Returns why it cannot serve a model on a device, and what to do; None: it can."""
        why_not = self._why_not_model(model) or self._why_not_device(Gpu.of(device).capability)
        return f"{why_not}. Use attention_backend=triton" if why_not else self._why_not_import()

    def _why_not_model(self, model: LibraryModel) -> str | None:
        if model.deterministic:
            return "deterministic is set, and the library is not batch-invariant"
        if model.dtype not in self.dtypes:
            expected = " or ".join(map(_name, self.dtypes))
            return f"the model computes in {_name(model.dtype)}; expected {expected}"
        if model.kv_dtype != model.dtype:
            return f"the KV cache is {_name(model.kv_dtype)}; expected {_name(model.dtype)}"
        if unknown := model.head_dims - set(self.head_dims):
            return f"heads have {min(unknown)} numbers; expected one of {self.head_dims}"
        if any(layer.sinks is not None for layer in model.layers):
            return "the model has attention sinks"
        return None

    def _why_not_device(self, capability: tuple[int, int]) -> str | None:
        if self.runs_on(capability):
            return None
        found = ".".join(map(str, capability))
        return f"the GPU has compute capability {found}; expected {self.capabilities}"

    def _why_not_import(self) -> str | None:
        try:
            import_module(self.module)
        except (ImportError, OSError) as error:  # OSError: a library of its own is missing
            return f"{self.module} cannot be imported ({error}). {self.how_to_install}"
        return None


LIBRARIES: Final = {
    "flashinfer": Library(
        "flashinfer",
        f"{install_command('flashinfer')}, or use attention_backend=triton",
        lambda capability: capability >= (8, 0),
        "8.0 or newer",
        (64, 128, 256),
        FlashInfer,
    ),
    "flash-attn": Library(
        "flash_attn_interface",
        "Build FlashAttention 3 from the folder hopper of its repository, or use "
        "attention_backend=triton",
        lambda capability: capability == (9, 0),
        "9.0 (Hopper)",
        HEAD_DIMS,
        FlashAttention,
    ),
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
