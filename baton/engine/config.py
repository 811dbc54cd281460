"""Engine configuration. Plain data; the engine derives the values that depend on the model."""

from dataclasses import dataclass

from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.engine.scheduler.sequences.config import Preemption
from baton.errors import InvalidArgumentError

KERNELS = ("auto", "triton", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
_OPTIONAL_COUNTS = (
    "num_blocks",
    "kv_cache_bytes",
    "max_model_len",
    "num_threads",
    "max_num_batched_tokens",
    "max_cache_reads",
    "long_prefill_threshold",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and budgets of one engine, validated when created.

    Attributes:
        device: "cpu", "cuda", "cuda:N", or "auto" (the first GPU, else the CPU).
        dtype: dtype of weights and, unless `kv_cache_dtype` is set, of the cache; "auto" is float32
            on a CPU and the checkpoint's own on a GPU.
        kv_cache_dtype: dtype of K and V in the cache: "auto" for that of the weights, or
            "fp8_e4m3", which fits twice as many tokens as bfloat16 (`baton.engine.cache.kv_scales`)
            and loses precision: outputs are not quite those of the model. On a GPU it needs compute
            capability 9.0.
        block_size: tokens in a KV block.
        num_blocks: blocks in the pool of each cache group. None: as many as fit `kv_cache_bytes`.
        kv_cache_bytes: size of all pools together when `num_blocks` is None. None: 512 MiB on a
            CPU, on a GPU the rest of `gpu_memory_utilization`.
        gpu_memory_utilization: fraction of the GPU's memory that weights, the largest step and the
            pools may take together, in (0, 1].
        max_model_len: maximum tokens of one sequence. None: the model's own limit.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step; longer prompts are cut into chunks.
            None: 128 on a CPU, where a step is slow and fills the cores anyway, 2048 on a GPU.
        prefix_caching: reuse the KV of equal prefixes.
        policy: scheduling policy, one of `baton.engine.scheduler.scheduling.policy.POLICIES`.
        max_cache_reads: tokens attended to in one step, over all its sequences. None: no limit.
        long_prefill_threshold: prompt tokens of one sequence in one step. None: no limit.
        free_block_margin: blocks that stay free for running sequences when a new one is admitted.
        full_sequence_must_fit: start no prompt that could not be computed to its end with the
            blocks that are free.
        preemption: "recompute", "swap", "return", or "auto": the mode with the least expected time.
            Only requests with a return cost are returned.
        shared_pools: on a CPU, keep the pools in memory that other processes of this host can map
            for reading, where the system has such memory.
        swap_bytes: host memory for the KV of preempted sequences; 0: no swap.
        max_drafts: draft tokens proposed and verified per sequence and step; 0: no speculation.
        speculate: default for requests that do not set it.
        kernels: "triton", "torch", or "auto": Triton's on a GPU, if there is a kernel for the
            model's heads, and torch's on a CPU.
        deterministic: batch-invariant logits: bitwise equal in any batch and with any chunks, at
            some cost in speed. Needs Triton's kernels and a Llama-shaped model, with experts or
            without (`baton.engine.models.llama_shaped`).
        cuda_graphs: replay decode steps from CUDA graphs on a GPU.
        async_scheduling: launch the next step, if sequences only continue in it, before the tokens
            of the current one have come back. None: on a GPU, which would be idle meanwhile.
        num_threads: CPU threads of one forward pass. None: torch's default.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    policy: str = "decode-first"
    max_cache_reads: int | None = None
    long_prefill_threshold: int | None = None
    free_block_margin: int = 0
    full_sequence_must_fit: bool = False
    preemption: str = "auto"
    swap_bytes: int = 0
    max_drafts: int = 0
    speculate: bool = True
    shared_pools: bool = False
    kernels: str = "auto"
    deterministic: bool = False
    cuda_graphs: bool = True
    async_scheduling: bool | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs"):
            _at_least_one(name, getattr(self, name))
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        for name in ("free_block_margin", "swap_bytes", "max_drafts"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(name, f"is {getattr(self, name)}; must be at least 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgumentError(
                "gpu_memory_utilization",
                f"is {self.gpu_memory_utilization:g}; must be in (0, 1]",
            )
        _one_of("policy", self.policy, tuple(POLICIES))
        _one_of("preemption", self.preemption, tuple(mode.value for mode in Preemption))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("kernels", self.kernels, KERNELS)
        if self.deterministic and self.kernels == "torch":
            raise InvalidArgumentError(
                "deterministic", "is set, which needs kernels to be triton or auto, not torch"
            )
        given = self.max_num_batched_tokens
        if given is not None and given < self.max_num_seqs:
            raise InvalidArgumentError(
                "max_num_batched_tokens",
                f"is {given}, less than max_num_seqs ({self.max_num_seqs}): every running sequence "
                "needs a token of each step",
            )

    def tokens_per_step(self, device_type: str) -> int:
        """Returns `max_num_batched_tokens`, or a default for the device and `max_num_seqs`."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, 128 if device_type == "cpu" else 2048)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InvalidArgumentError(name, f"is {value}; must be at least 1")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(name, f"is {value!r}; must be one of {', '.join(choices)}")
