"""Triton backend: an engine on Baton's kernels, on a GPU or in Triton's interpreter."""

import logging
from collections.abc import Sequence
from functools import partial

import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.attention.interface import Attention
from baton.engine.executor.attention.library_attention import LibraryAttention
from baton.engine.executor.attention.library_choice import LIBRARIES, Library, LibraryModel
from baton.engine.executor.attention.static_batch import StaticTritonBatch
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.executor.cache.kv_scales import FP8
from baton.engine.executor.models.cuda_graphs import (
    NO_GRAPHS,
    CudaRecorder,
    Graphs,
    capture_sizes,
    record_decodes,
    recorded_bytes,
)
from baton.engine.executor.models.hf import PreTrainedModel
from baton.engine.executor.models.llama_shaped import why_unknown
from baton.engine.executor.models.transformers_model import (
    AttentionHook,
    ProbedLayer,
    TransformersModel,
)
from baton.engine.executor.models.triton.kernel_layers import fuse_residuals
from baton.engine.executor.models.triton.kernel_modules import swap_modules
from baton.engine.executor.models.triton.triton_model import TritonModel, batch_invariant, library
from baton.engine.executor.runner import DecoderModel
from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.executor.sampling.triton_choice import TritonChooser
from baton.engine.executor.warm_up import warm_up
from baton.errors import InvalidArgumentError
from baton_kernels.compilations import CompilationMeter

logger = logging.getLogger(__name__)

# A sequence with more drafts is attended as a prompt is, and its step is not recorded: every few
# tokens read its context once more, and the partial results of each take memory.
_MOST_DECODE_TOKENS = 16


def choose_library(
    config: EngineConfig, model: PreTrainedModel, layers: list[ProbedLayer], device: torch.device
) -> Library | None:
    """Returns the library that attends; None: Triton's kernels do. Raises `InvalidArgumentError` if
    the config names one that cannot."""
    name = config.attention_backend
    if name not in LIBRARIES:
        why = " (attention_backend is auto, which chooses no library)" if name == "auto" else ""
        logger.info("Triton's kernels compute attention%s", why)
        return None
    described = LibraryModel(
        dtype=model.dtype,
        kv_dtype=FP8 if config.kv_cache_dtype == "fp8_e4m3" else model.dtype,
        head_dims=frozenset(layer.shape.key_head_dim for layer in layers),
        layers=[layer.attention for layer in layers],
        deterministic=config.deterministic,
    )
    why_not = LIBRARIES[name].why_not(described, device)
    if why_not is not None:
        raise InvalidArgumentError("attention_backend", f"is {name!r}, but {why_not}")
    recorded = "; in decode steps replayed from CUDA graphs Triton's do" * config.cuda_graphs
    logger.info("%s computes attention, as attention_backend says%s", name, recorded)
    return LIBRARIES[name]


class TritonBackend:
    """Backend of Triton kernels, as `Backend`. With a `library`, that one attends in steps which
    are not recorded."""

    def __init__(
        self,
        config: EngineConfig,
        layers: list[ProbedLayer],
        dtype: torch.dtype,
        max_len: int,
        library: Library | None = None,
    ) -> None:
        self._config = config
        self._layers = layers
        self._dtype = dtype
        self._max_len = max_len
        self._library = library
        self._compilations = CompilationMeter()
        self._recorder: CudaRecorder | None = None
        self.num_expected_graphs = 0

    @property
    def num_late_compilations(self) -> int:
        return self._compilations.num_late

    def decoder(self, model: PreTrainedModel, hook: AttentionHook) -> DecoderModel:
        if why_unknown(model) is not None:
            return _as_it_is(model, hook)
        product = batch_invariant if self._config.deterministic else library
        attentions = [layer.attention for layer in self._layers]
        return TritonModel(model, attentions, self._max_len, product)

    def attention(self, cache: KvCache) -> TritonAttention | LibraryAttention:
        num_heads = [layer.num_heads for layer in self._layers]
        attention = TritonAttention(
            cache,
            num_heads,
            self._dtype,
            self._max_len,
            deterministic=self._config.deterministic,
            max_decode_tokens=self._max_decode_tokens,
        )
        if self._library is None:
            return attention
        layers = [layer.attention for layer in self._layers]
        caches = [cache.pools[place.group].layers[place.index] for place in cache.places]
        library = self._library.kernels(attention.device, self._dtype)
        return LibraryAttention(attention, layers, caches, library)

    def sampler(
        self,
        num_batch_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
    ) -> Sampler:
        chooser = TritonChooser(num_batch_slots, vocab_size, device)
        return Sampler(num_batch_slots, vocab_size, device, eos_token_ids, chooser)

    def graph_bytes(self, model: DecoderModel, attention: Attention) -> int:
        attention = _recorded(attention)
        if not self._has_graphs(attention):
            return 0
        device = attention.device

        def reserved() -> int:
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved(device)

        return recorded_bytes(partial(self._record, model, attention), self._sizes, reserved)

    def warm_up(
        self, model: DecoderModel, attention: Attention, sampler: Sampler, cache: KvCache
    ) -> None:
        config, recorded = self._config, _recorded(attention)
        if recorded.device.type != "cpu":  # where Triton's interpreter compiles nothing
            warm_up(
                model,
                attention,
                recorded,
                sampler,
                cache,
                num_tokens=config.tokens_per_step("cuda"),
                max_len=self._max_len,
                num_rows=config.max_num_seqs,
            )

    def graphs(self, model: DecoderModel, attention: Attention) -> Graphs:
        attention, graphs = _recorded(attention), NO_GRAPHS
        if self._has_graphs(attention):
            graphs = self._record(model, attention, self._sizes)
            num_expected = self.num_expected_graphs
            logger.info("recorded %d of %d CUDA graphs", graphs.num_graphs, num_expected)
        self._compilations.start()
        return graphs

    def _has_graphs(self, attention: TritonAttention) -> bool:
        return attention.device.type == "cuda" and self._config.cuda_graphs

    @property
    def _sizes(self) -> list[int]:
        return capture_sizes(self._config.max_num_seqs, self._max_decode_tokens)

    @property
    def _max_decode_tokens(self) -> int:
        return min(1 + self._config.max_drafts, _MOST_DECODE_TOKENS)

    def _record(
        self, model: DecoderModel, attention: TritonAttention, sizes: Sequence[int]
    ) -> Graphs:
        config = self._config
        max_blocks = -(-(self._max_len + config.max_drafts + 1) // config.block_size)
        batch = StaticTritonBatch(attention, sizes[-1], max_blocks)
        self.num_expected_graphs = len(sizes) * len(batch.forms)
        if self._recorder is None:
            self._recorder = CudaRecorder()
        self._recorder.use_new_pool()
        return record_decodes(
            model.forward,
            batch,
            sizes,
            attention.device,
            self._recorder,
            has_mrope=model.has_mrope,
        )


def _recorded(attention: Attention) -> TritonAttention:
    """Returns the attention of recorded steps."""
    if isinstance(attention, LibraryAttention):
        return attention.recorded
    assert isinstance(attention, TritonAttention), "another backend's attention"
    return attention


def _as_it_is(model: PreTrainedModel, hook: AttentionHook) -> TransformersModel:
    """Runs the transformers model itself, with kernels for the modules known to compute alike."""
    decoder = TransformersModel(model, hook)
    swapped = swap_modules(model)
    num_sums = fuse_residuals(model, decoder, model.device)
    logger.info(
        "%s runs as it is, but our kernels compute %d of its RMSNorms, %d of them with the "
        "residual, and %d gated MLPs",
        type(model).__name__,
        swapped.num_norms,
        num_sums,
        swapped.num_mlps,
    )
    return decoder
