"""How an engine is set up. Plain data; what depends on the model is worked out by the engine."""

from dataclasses import dataclass

from baton.errors import InvalidArgumentError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and budgets of one engine. Checked when made.

    Attributes:
        device: "cpu", "cuda", "cuda:N", or "auto" (the first GPU, else the CPU).
        dtype: of weights and cache; "auto" is float32 on a CPU and the checkpoint's own on a GPU.
        block_size: tokens in a KV block.
        num_blocks: blocks in the pool. None: as many as fit `kv_cache_bytes`.
        kv_cache_bytes: size of the pool when `num_blocks` is None.
        max_model_len: tokens of one sequence at most. None: what the model was made for.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step; longer prompts are cut into chunks.
            None: 128 on a CPU, where a step is slow and fills the cores anyway, 2048 on a GPU.
        prefix_caching: find the KV of equal prefixes again.
        num_threads: CPU threads of one forward. None: as torch decides.
    """

    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 512 * 2**20
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "kv_cache_bytes"):
            _at_least_one(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len", "num_threads", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.dtype not in DTYPES:
            raise InvalidArgumentError("dtype", f"is {self.dtype!r}; must be one of {DTYPES}")
        given = self.max_num_batched_tokens
        if given is not None and given < self.max_num_seqs:
            raise InvalidArgumentError(
                "max_num_batched_tokens",
                f"is {given}, less than max_num_seqs ({self.max_num_seqs}): every running sequence "
                "needs a token of each step",
            )

    def tokens_per_step(self, device_type: str) -> int:
        """`max_num_batched_tokens`, or what suits the device and the number of sequences."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, 128 if device_type == "cpu" else 2048)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InvalidArgumentError(name, f"is {value}; must be at least 1")
