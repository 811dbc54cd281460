"""Engine configuration. Plain data; the engine derives the values that depend on the model.

The settings of a worker follow from these fields. Knows nothing of pydantic, without which the
engine runs.
"""

from dataclasses import Field, dataclass, fields
from typing import Any, Literal, get_args, get_origin

from baton.engine.plugins import drafter_named, policy_named
from baton.errors import InvalidArgumentError
from baton.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and budgets of one engine.

    Raises `InvalidArgumentError` that names the field, the value and its bound.
    """

    device: str = setting("auto", "cpu, cuda, cuda:N, or auto: the first GPU, else the CPU.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "dtype of the weights and, unless kv_cache_dtype is set, of the KV cache; equal on all "
        "workers. auto: the checkpoint's own on a GPU and, if it is bfloat16, on a CPU that "
        "multiplies it (AVX-512 BF16 or AMX); float32 else.",
    )
    quantization: Literal["none", "int8", "int4"] = setting(
        "none",
        "Quantizes the weights at load, on a CPU: int8 takes half the memory of bfloat16, int4 a "
        "third; one sequence decodes up to as many times faster, at a loss of precision, more of "
        "it in int4. Equal on all workers. none: as the checkpoint has them, quantized or not.",
    )
    packed_weights_bytes: int = setting(
        32 * 2**30,
        "Maximum bytes of packed weights in the cache folder (XDG_CACHE_HOME), of all models. On a "
        "CPU a model of plain layers is packed there once, and all workers of the host map its "
        "file. 0: each worker packs weights for itself, in its own memory.",
        ge=0,
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = setting(
        "auto",
        "dtype of the KV cache; equal on all workers. auto: that of the weights. fp8_e4m3: one "
        "byte per number, scaled by the checkpoint's k_scale and v_scale; holds twice the tokens "
        "of bfloat16, at a loss of precision; on a GPU it needs compute capability 8.9 (Ada).",
    )
    block_size: int = setting(16, "Tokens of a KV block; equal on all workers.", ge=1)
    num_blocks: int | None = setting(
        None,
        "KV blocks in the pool of each cache group. Unset: as many as fit kv_cache_bytes.",
        ge=1,
    )
    kv_cache_bytes: int | None = setting(
        None,
        "Size of all KV pools together, in bytes. Unset: on a CPU up to four sequences of the "
        "model's length within a quarter of the free memory, at least 512 MiB; on a GPU the rest "
        "of gpu_memory_utilization.",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Fraction of the GPU's memory that this worker takes for weights, the largest step, CUDA "
        "graphs, encoder outputs and the KV pools together.",
        gt=0,
        le=1,
    )
    max_model_len: int | None = setting(
        None, "Maximum tokens of one sequence. Unset: the model's own limit.", ge=1
    )
    max_num_seqs: int = setting(64, "Maximum sequences that run at once.", ge=1)
    max_num_batched_tokens: int | None = setting(
        None,
        "Maximum tokens of one step; longer prompts are computed in chunks. Unset: 512 on a CPU, "
        "2048 on a GPU.",
        ge=1,
    )
    max_num_tokens_with_decodes: int | None = setting(
        None,
        "Maximum tokens of a step in which sequences decode, so that long prompts delay their "
        "tokens less. Unset: max_num_batched_tokens if that is set, else 128 on a CPU, or more for "
        "images that chunks must not cut, 2048 on a GPU.",
        ge=1,
    )
    prefix_caching: bool = setting(True, "Reuse the KV blocks of equal prefixes.")
    policy: str = setting(
        "decode-first",
        "Scheduling policy. fcfs: strictly in order of arrival. priority: the smallest priority of "
        "a request first, with ageing. prefill-first: prompts that have begun, then decodes, then "
        "prompts that wait; lowest TTFT, highest inter-token latency; a decode waits until the "
        "begun prompts are computed, never for one that has not begun. decode-first: decodes "
        "before prompts, so that no prompt delays a decode. deadline: the earliest due time of the "
        "first token first, by the router's --slo-ttft-ms or the client's deadline. "
        "shortest-prefill: decodes, then short prompts before long ones, with ageing. Or "
        "one that an installed package adds (baton.scheduling_policies).",
    )
    max_cache_reads: int | None = setting(
        None,
        "Maximum tokens attended to in one step, summed over its sequences, as a mean over the "
        "layers, of which a windowed one reads its window: keeps steps short when many long "
        "sequences run. A sequence that does not fit is passed over for those after it; every 16th "
        "step begins with the one passed over for longest. Unset: no limit.",
        ge=1,
    )
    long_prefill_threshold: int | None = setting(
        None,
        "Maximum tokens of one prompt in one step, so that a long prompt leaves room for others. "
        "Unset: no limit but that of the step.",
        ge=1,
    )
    handoff_chunk_tokens: int | None = setting(
        None,
        "A prompt that another worker continues is computed in chunks of half of what is left of "
        "it, none of fewer than these tokens, so that its KV moves while the rest is computed; not "
        "in a step in which sequences decode. From max_num_batched_tokens on it changes nothing. "
        "Unset: 512 on a CPU, 2048 on a GPU, as many as a step has by default.",
        ge=1,
    )
    free_block_margin: float = setting(
        0.05,
        "Fraction of the KV blocks that stays free for running sequences: prompts, waiting or "
        "begun, leave it unless nothing else runs. A larger margin means fewer preemptions and "
        "fewer sequences at once.",
        ge=0,
        lt=1,
    )
    full_sequence_must_fit: bool = setting(
        False,
        "Start a prompt only if all of it fits into the free KV blocks. A prefill for another "
        "worker always waits for that.",
    )
    preemption: Literal["auto", "recompute", "swap", "return"] = setting(
        "auto",
        "Handling of a preempted sequence's KV. recompute: drop and recompute it. swap: keep it in "
        "host memory, up to swap_bytes. return: drop it and return the request, if it came from a "
        "prefill worker, to the router, which places it again. auto: the mode with the least "
        "expected time.",
    )
    swap_bytes: int = setting(
        0, "Host memory for the KV of preempted sequences, in bytes. 0: no swap.", ge=0
    )
    max_drafts: int = setting(
        0,
        "Maximum draft tokens that drafter proposes and that are verified, per sequence and step. "
        "Changes no result; faster where outputs repeat their prompt. 0: no speculation.",
        ge=0,
    )
    drafter: str = setting(
        "ngram",
        "Proposer of draft tokens. ngram: what followed the latest tokens earlier in the text. Or "
        "one that an installed package adds (baton.drafters).",
    )
    encoder_budget: int | None = setting(
        None,
        "Maximum tokens of images that one step encodes, of a model that takes images. Unset: as "
        "many as a step computes, but at least one image.",
        ge=1,
    )
    encoder_cache_tokens: int | None = setting(
        None,
        "Tokens of images whose encoder output is kept, for all requests with the same image, in "
        "memory beside the KV pools. Unset: 256 MiB of them, or a 64th of the GPU's memory if that "
        "is more, but at least four times encoder_budget.",
        ge=1,
    )
    encoder_only: bool = setting(
        False,
        "Load the encoder of a vision-language model alone, without its language model and without "
        "room for KV: for encode workers, which then keep their role.",
    )
    speculate: bool = setting(
        True, "Speculate, up to max_drafts, for requests that do not set it themselves."
    )
    shared_pools: bool = setting(
        False,
        "Keep the KV pools and encoder outputs on a CPU in memory that workers of the same user on "
        "this host may read, so that blocks move at the speed of memory.",
    )
    kernels: Literal["auto", "triton", "torch"] = setting(
        "auto",
        "Kernels of attention and other operations. auto: Triton's on a GPU, if there is one for "
        "the model's heads; on a CPU torch's, and for attention, norms, activations and rotations "
        "kernels in C, if there is a C compiler to build them at the first start. torch: torch's "
        "alone.",
    )
    attention_backend: Literal["auto", "triton", "flashinfer", "flash-attn"] = setting(
        "auto",
        "Attention on a GPU. triton: Baton's kernels. flashinfer: FlashInfer's "
        "(the extra flashinfer). flash-attn: FlashAttention 3's, on Hopper "
        "(the extra flash-attn). auto: triton. A library needs float16 or bfloat16, with a KV "
        "cache of the same dtype, and no attention sinks; decode steps replayed from CUDA graphs "
        "are triton's.",
    )
    deterministic: bool = setting(
        False,
        "Batch-invariant logits: bitwise equal in any batch, with any chunks, on any worker with "
        "this setting. Slower; needs a GPU and a Llama-shaped model, with experts or without.",
    )
    cuda_graphs: bool = setting(True, "Replay decode steps from CUDA graphs on a GPU.")
    async_scheduling: bool | None = setting(
        None,
        "Launch a step before the tokens of the previous one are back. Unset: on a GPU, which "
        "would be idle meanwhile.",
    )
    max_grammar_s: float = setting(
        10.0,
        "CPU seconds that the grammar of one request may take in steps, all its sequences "
        "together; beyond, it fails. A mask takes 10 to 100 microseconds, of a hostile grammar "
        "milliseconds, for which all sequences of the worker wait.",
        gt=0,
        le=86_400,
    )
    num_threads: int | None = setting(
        None, "CPU threads of one forward pass. Unset: torch's default.", ge=1
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each, getattr(self, each.name))
        policy_named(self.policy)
        drafter_named(self.drafter)
        if self.deterministic and self.kernels == "torch":
            raise InvalidArgumentError(
                "deterministic", "is set, which needs kernels to be triton or auto, not torch"
            )
        if self.attention_backend != "auto" and self.kernels == "torch":
            raise InvalidArgumentError(
                "attention_backend",
                f"is {self.attention_backend!r}, which needs kernels to be triton or auto, not "
                "torch",
            )
        for name in ("max_num_batched_tokens", "max_num_tokens_with_decodes"):
            given = getattr(self, name)
            if given is not None and given < self.max_num_seqs:
                raise InvalidArgumentError(
                    name,
                    f"is {given}, less than max_num_seqs ({self.max_num_seqs}): every running "
                    "sequence needs a token of each step",
                )
        most, given = self.max_num_batched_tokens, self.max_num_tokens_with_decodes
        if most is not None and given is not None and given > most:
            raise InvalidArgumentError(
                "max_num_tokens_with_decodes",
                f"is {given}, more than max_num_batched_tokens ({most})",
            )

    def tokens_per_step(self, device_type: str) -> int:
        """Returns `max_num_batched_tokens`, or a default for the device and the other limits."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        least = max(self.max_num_seqs, self.max_num_tokens_with_decodes or 0)
        return max(least, _default_step(device_type))

    def tokens_with_decodes(self, device_type: str) -> int:
        """Returns `max_num_tokens_with_decodes`, or its default."""
        if self.max_num_tokens_with_decodes is not None:
            return self.max_num_tokens_with_decodes
        if self.max_num_batched_tokens is not None or device_type != "cpu":
            return self.tokens_per_step(device_type)
        return max(self.max_num_seqs, 128)

    def least_handoff_chunk(self, device_type: str) -> int:
        """Returns `handoff_chunk_tokens`, or its default."""
        return self.handoff_chunk_tokens or _default_step(device_type)


def _default_step(device_type: str) -> int:
    return 512 if device_type == "cpu" else 2048


def _check(setting: Field[Any], value: Any) -> None:
    choices, bounds = get_args(setting.type), setting.metadata
    if get_origin(setting.type) is Literal and value not in choices:
        raise InvalidArgumentError(
            setting.name, f"is {value!r}; must be one of {', '.join(choices)}"
        )
    if value is None:
        return
    if "ge" in bounds and value < bounds["ge"]:
        raise InvalidArgumentError(setting.name, f"is {value}; must be at least {bounds['ge']}")
    if "lt" in bounds and value >= bounds["lt"]:
        raise InvalidArgumentError(setting.name, f"is {value}; must be below {bounds['lt']}")
    if "gt" in bounds and not bounds["gt"] < value <= bounds["le"]:
        raise InvalidArgumentError(
            setting.name, f"is {value:g}; must be in ({bounds['gt']}, {bounds['le']}]"
        )
