"""Compute backend of an engine: torch operations or Triton kernels. Chosen once, at load."""

import functools
import logging
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.attention.in_place_attention import InPlaceAttention, why_not_in_place
from baton.engine.executor.attention.interface import Attention, LayerAttention
from baton.engine.executor.attention.torch_attention import TorchAttention
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.executor.kernel_choice import triton_setting, why_no_products_in_c
from baton.engine.executor.models.cuda_graphs import NO_GRAPHS, Graphs
from baton.engine.executor.models.fused_model import FusedModel
from baton.engine.executor.models.hf import PreTrainedModel
from baton.engine.executor.models.linear import IN_C, QUANTIZED, TORCH, Products
from baton.engine.executor.models.llama_shaped import DENSE, is_dense, why_unknown
from baton.engine.executor.models.packed.packed_folder import (
    LEAST_BYTES,
    OWN_LAYERS,
    PackedLayers,
    SharedLayers,
)
from baton.engine.executor.models.rowwise import Rowwise, TorchRowwise
from baton.engine.executor.models.transformers_model import (
    AttentionHook,
    ProbedLayer,
    TransformersModel,
)
from baton.engine.executor.runner import DecoderModel
from baton.engine.executor.sampling.sampler import Sampler
from baton.errors import InvalidArgumentError
from baton.models.user_cache import user_cache
from baton_kernels.cpu.library import KERNELS, NoLibraryError
from baton_kernels.cpu.library import Library as CLibrary
from baton_kernels.cpu.paged_attention import prompt_arithmetic
from baton_kernels.cpu.rowwise import DTYPES, RowwiseKernels

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Compute backend: factory of an engine's model, attention, sampler and graphs."""

    def decoder(self, model: PreTrainedModel, hook: AttentionHook) -> DecoderModel:
        """Returns the model in its fastest form; consumes `model`."""
        ...

    def attention(self, cache: KvCache) -> Attention: ...

    def sampler(
        self,
        num_batch_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
    ) -> Sampler: ...

    def graph_bytes(self, model: DecoderModel, attention: Attention) -> int:
        """Returns the memory in bytes that `graphs` will take."""
        ...

    def warm_up(
        self, model: DecoderModel, attention: Attention, sampler: Sampler, cache: KvCache
    ) -> None:
        """Compiles every kernel that serving can launch, so that no step waits for one."""
        ...

    def graphs(self, model: DecoderModel, attention: Attention) -> Graphs:
        """Returns recorded decode steps, if the backend has any. Ends the warm-up."""
        ...

    @property
    def num_expected_graphs(self) -> int:
        """Graphs that `graphs` was to record."""
        ...

    @property
    def num_late_compilations(self) -> int:
        """Kernels compiled after the warm-up."""
        ...


class TorchBackend:
    """Backend of torch operations, for any torch device; the backend for CPUs.

    `uses_c_kernels`: kernels in C, where they are available, read blocks in place for attention
    and compute products and row-wise operations. `products`: those that they compute. `library`:
    those of attention. `packed`: the layers of a model that they are for.
    """

    def __init__(
        self,
        layers: list[LayerAttention],
        *,
        uses_c_kernels: bool,
        products: Products = IN_C,
        library: CLibrary = KERNELS,
        packed: PackedLayers = OWN_LAYERS,
    ) -> None:
        self._layers = layers
        self._packed = packed
        self._library = library
        self._uses_c_kernels = uses_c_kernels
        self._products = products

    def decoder(self, model: PreTrainedModel, hook: AttentionHook) -> DecoderModel:
        if is_dense(model):
            rowwise, products = self._operations(model)
            build = partial(FusedModel, model, self._layers, hook.max_len, rowwise)
            return build(self._packed.over(products, build))
        return TransformersModel(model, hook)

    def _operations(self, model: PreTrainedModel) -> tuple[Rowwise, Products]:
        if model.device.type == "meta":  # an encoder's, which runs on other workers alone
            return TorchRowwise(), replace(TORCH, execution=self._products.execution)
        if self._uses_c_kernels and model.dtype in DTYPES:
            try:
                return RowwiseKernels(model.dtype), self._products
            except NoLibraryError as error:
                _report(f"torch computes products, norms, activations and rotations: {error}")
        return TorchRowwise(), TORCH

    def attention(self, cache: KvCache) -> Attention:
        if not self._uses_c_kernels:
            return TorchAttention(cache)
        why_not = why_not_in_place(cache, self._layers, self._library)
        if why_not is not None:
            _report(f"torch computes attention, over copies of blocks: {why_not}")
            return TorchAttention(cache)
        arithmetic = prompt_arithmetic(cache.pools[0].dtype)
        _report(f"attention reads blocks in place, by kernels in C; prompts use {arithmetic}")
        return InPlaceAttention(cache)

    def sampler(
        self,
        num_batch_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
    ) -> Sampler:
        return Sampler(num_batch_slots, vocab_size, device, eos_token_ids)

    def graph_bytes(self, _model: DecoderModel, _attention: Attention) -> int:
        return 0

    def warm_up(
        self, _model: DecoderModel, _attention: Attention, _sampler: Sampler, _cache: KvCache
    ) -> None:
        return

    def graphs(self, _model: DecoderModel, _attention: Attention) -> Graphs:
        return NO_GRAPHS

    @property
    def num_expected_graphs(self) -> int:
        return 0

    @property
    def num_late_compilations(self) -> int:
        return 0


def choose_backend(
    config: EngineConfig,
    model: PreTrainedModel,
    layers: list[ProbedLayer],
    max_len: int,
    device: torch.device,
    weights: bytes = b"",
) -> Backend:
    """Chooses the backend for `model` on `device`, whose weights have a fingerprint: `weights`,
    empty if it is not known. Raises `InvalidArgumentError`, with the setting
    to change, if the config requires kernels that cannot run."""
    wanted = triton_setting(config)
    if config.quantization != "none" and (why_not := _why_not_quantized(config, model, device)):
        raise InvalidArgumentError(
            "quantization",
            f"is {config.quantization!r}, for which products are kernels in C; {why_not}",
        )
    if config.kernels != "torch" and (wanted is not None or device.type == "cuda"):
        why_not = _why_no_kernels(config, model, layers, device)
        if why_not is None:
            from baton.engine.executor.triton_backend import TritonBackend, choose_library

            library = choose_library(config, model, layers, device)
            return TritonBackend(config, layers, model.dtype, max_len, library)
        if wanted is not None:
            raise InvalidArgumentError(
                wanted, f"is {getattr(config, wanted)!r}, which needs Triton's kernels; {why_not}"
            )
        logger.warning("torch computes attention, which is slower: %s", why_not)
    uses_c_kernels = config.kernels == "auto" and device.type == "cpu"
    return TorchBackend(
        [layer.attention for layer in layers],
        uses_c_kernels=uses_c_kernels,
        products=QUANTIZED.get(config.quantization, IN_C),
        packed=_packed_layers(config, model, weights),
    )


def _packed_layers(config: EngineConfig, model: PreTrainedModel, weights: bytes) -> PackedLayers:
    num_bytes = sum(each.nbytes for each in model.parameters() if each.device.type == "cpu")
    if not (weights and config.packed_weights_bytes) or num_bytes < LEAST_BYTES:
        return OWN_LAYERS
    try:
        folder = user_cache("weights")
    except RuntimeError:  # there is no home
        return OWN_LAYERS
    return SharedLayers(folder, weights, num_bytes, config.packed_weights_bytes)


@functools.cache
def _report(choice: str) -> None:
    """Logs a choice once per process: attention is made for the self-check and again to serve."""
    logger.info("%s", choice)


def _why_not_quantized(
    config: EngineConfig, model: PreTrainedModel, device: torch.device
) -> str | None:
    """Returns the reason for which weights cannot be quantized at load; None if they can."""
    if (reason := why_no_products_in_c(config, device, model.dtype)) is not None:
        return reason
    if not is_dense(model):
        return (
            f"this {type(model).__name__} has none, only plain {' and '.join(DENSE.values())} "
            "models do: unset it"
        )
    return None


def _why_no_kernels(
    config: EngineConfig, model: PreTrainedModel, layers: list[ProbedLayer], device: torch.device
) -> str | None:
    if device.type != "cuda" and not _host_runs_kernels():
        return "they run on a GPU and the device is a CPU: unset it there"
    from baton_kernels.attention.inputs import check_model

    if config.deterministic and (reason := why_unknown(model)) is not None:
        return reason
    for layer in layers:
        shape = layer.shape
        if shape.key_head_dim != shape.value_head_dim:
            return f"K has heads of {shape.key_head_dim} and V of {shape.value_head_dim}"
        try:
            check_model(layer.num_heads, shape.num_kv_heads, shape.key_head_dim)
        except ValueError as error:
            return str(error)
    return None


def _host_runs_kernels() -> bool:
    if find_spec("triton") is None:
        return False
    from baton_kernels.launch import host_runs_kernels

    return host_runs_kernels()
